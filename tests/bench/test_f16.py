"""Writing a GGUF file as F16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import quantize

from bench.f16 import write_f16


def test_matrices_become_f16_and_the_rest_stays(tmp_path: Path) -> None:
    source, target = tmp_path / "q8.gguf", tmp_path / "home" / "f16.gguf"
    matrix = np.linspace(-1, 1, 4 * 64, dtype=np.float32).reshape(4, 64)
    writer = GGUFWriter(source, arch="llama")
    writer.add_name("tiny")
    writer.add_token_list(["a", "b"])
    writer.add_token_scores([0.5, 1.5])
    kind = GGMLQuantizationType.Q8_0
    writer.add_tensor("matrix", quantize(matrix, kind), raw_dtype=kind)
    writer.add_tensor("vector", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    write_f16(source, target)
    reader = GGUFReader(target)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert {name: tensor.tensor_type.name for name, tensor in tensors.items()} == {"matrix": "F16", "vector": "F32"}
    np.testing.assert_allclose(tensors["matrix"].data, matrix, atol=0.01)
    assert reader.fields["general.name"].contents() == "tiny"
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert reader.fields["tokenizer.ggml.scores"].contents() == [0.5, 1.5]
    assert [path.name for path in target.parent.iterdir()] == ["f16.gguf"]
