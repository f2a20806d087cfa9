"""The planner predicts what the engine allocates, to the byte.

The engine calls ``core.sizes.plan_memory`` on the layout that its model family makes from
transformers' configuration; the planner reads the plain ``config.json``. Both must meet.
"""

from __future__ import annotations

import pytest

from kvloom.core.codec_sizes import parse_codec
from kvloom.core.layout import group_layers
from kvloom.core.sizes import MemoryPlan, plan_memory
from kvloom.core.storage import Encoding
from kvloom.planner.accounting import Kvloom

from .helpers import accounting, architecture

MODELS = ("smollm2-135m", "gemma-3-270m")
CODECS = {"k": "bfloat16", "v": "bfloat16"}


def engine_plan(name: str, block_size: int, tokens: int, chunk: int, codec: str = "raw") -> MemoryPlan:
    choice = parse_codec(codec)
    encoding = Encoding(
        name=choice.name,
        key=choice.key,
        value=choice.value,
        sink_tokens=choice.sink_tokens,
        recent_tokens=choice.recent_tokens,
    )
    return plan_memory(
        architecture(name).layout,
        budget_bytes=2**33,
        block_size=block_size,
        codecs=CODECS,
        max_model_len=tokens,
        max_batch_tokens=chunk,
        encoding=None if codec == "raw" else encoding,
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("block_size", [8, 32, 256])
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 512, 1000, 8192])
@pytest.mark.parametrize("chunk", [256, 512])
@pytest.mark.parametrize("codec", ["raw", "int8", "kivi2", "k=int8,v=turboquant3"])
def test_arena_bytes(name: str, block_size: int, tokens: int, chunk: int, codec: str) -> None:
    plan = engine_plan(name, block_size, tokens, chunk, codec)
    predicted = accounting("kvloom", name, codec, block_size=block_size, chunk=chunk)
    assert isinstance(predicted, Kvloom)
    assert predicted.slab_bytes() == plan.slab_bytes
    for batch in (1, 2, 7):
        assert predicted.total(tokens, batch) == plan.slabs_for(batch, tokens) * plan.slab_bytes
    assert predicted.total(tokens, 1) == plan.needed_bytes(tokens)


@pytest.mark.parametrize("name", MODELS)
def test_largest_batch(name: str) -> None:
    from kvloom.planner.fit import DeviceCache
    from kvloom.planner.parallel import Parallel

    from .helpers import format_of

    plan = engine_plan(name, 32, 8192, 512)
    cache = DeviceCache(architecture(name), format_of(), "kvloom", Parallel())
    assert cache.largest_batch(plan.usable_slabs * plan.slab_bytes, 8192) == plan.sequences_at_max_len


@pytest.mark.parametrize(("name", "model_type"), [("smollm2-135m", "llama"), ("gemma-3-270m", "gemma3_text")])
def test_layers_of_the_engine_family(name: str, model_type: str) -> None:
    """The engine's own reading of transformers' configuration gives the same layers."""
    transformers = pytest.importorskip("transformers")
    families = pytest.importorskip("kvloom.models.families")
    from kvloom.planner.presets import load_preset

    values = {key: value for key, value in load_preset(name).config.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(model_type, **values)
    layers = families.find_family(model_type, allow_unverified=False).layers(config)
    assert group_layers(layers) == architecture(name).layout
