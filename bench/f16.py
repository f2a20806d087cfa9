"""A GGUF file of any quantisation as F16, for engines that should read weights of 16 bits."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize

_REPLACED = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def write_f16(source: Path, target: Path) -> None:
    """Write ``source`` to ``target``: matrices as float16, vectors as float32, metadata as it is."""
    reader = GGUFReader(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.partial")
    try:
        writer = GGUFWriter(partial, arch=reader.fields["general.architecture"].contents())
        writer.add_file_type(LlamaFileType.MOSTLY_F16)
        for field in reader.fields.values():
            if not field.name.startswith(_REPLACED):
                kind = field.types[0]
                element = field.types[-1] if kind == GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), kind, sub_type=element)
        for tensor in reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, values.astype(np.float32 if values.ndim == 1 else np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
