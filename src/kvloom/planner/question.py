"""What is asked of the planner, and the refusal of what cannot be asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvloom.core.errors import ConfigError
from kvloom.core.sizes import DTYPE_BYTES, check_block_size
from kvloom.planner.accounting import ACCOUNTINGS
from kvloom.planner.roofline import COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY
from kvloom.planner.trace import Trace
from kvloom.planner.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked. Sizes and degrees of None take the defaults, which are printed."""

    model: str
    context: int | None = None
    batch: int = 1
    codec: str = "raw"
    dtype: str = "bfloat16"
    sink_tokens: int | None = None
    recent_tokens: int | None = None
    protect_layers: frozenset[int] = frozenset()
    encode_windows: bool = False
    block_size: int = 32
    chunk: int | None = None
    accounting: str = "ideal"
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    device: str | None = None
    memory: str | None = None
    bandwidth: str | None = None
    tflops: float | None = None
    utilisation: float = 0.9
    memory_efficiency: float = MEMORY_EFFICIENCY
    compute_efficiency: float = COMPUTE_EFFICIENCY
    weights: str | None = None
    weight_dtype: str | None = None
    price_per_hour: float | None = None
    what_if: str | None = None
    situation: str | None = None
    workload: Workload | None = None
    target_ttft_s: float | None = None
    target_tpot_s: float | None = None
    max_kl: float | None = None
    tiers: tuple[str, ...] = ()
    trace: Trace | None = None
    replay: bool = False
    units: tuple[str, ...] = field(default=())


def check(question: Question) -> None:
    """Refuse what cannot be asked.

    Raises:
        ConfigError: naming the value, the limit and the remedy.
    """
    if question.batch < 1:
        raise ConfigError(f"--batch is {question.batch}; it must be at least 1 sequence")
    for name in ("tp", "pp", "dp"):
        degree = getattr(question, name)
        if degree is not None and degree < 1:
            raise ConfigError(f"{name} is {degree}; it must be at least 1")
    if question.dtype not in DTYPE_BYTES:
        raise ConfigError(f"--dtype is {question.dtype!r}; it must be one of {', '.join(DTYPE_BYTES)}")
    if question.accounting not in ACCOUNTINGS:
        raise ConfigError(f"--accounting is {question.accounting!r}; it must be one of {', '.join(ACCOUNTINGS)}")
    check_block_size(question.block_size)
    for name, value in (("--sink-tokens", question.sink_tokens), ("--recent-tokens", question.recent_tokens)):
        if value is not None and value < 0:
            raise ConfigError(f"{name} is {value}; it must be zero or more tokens")
    if question.chunk is not None and question.chunk < 1:
        raise ConfigError(f"--chunk is {question.chunk}; it must be at least 1 token")
    for name, share in (
        ("--utilisation", question.utilisation),
        ("--mbu", question.memory_efficiency),
        ("--mfu", question.compute_efficiency),
    ):
        if not 0 < share <= 1:
            raise ConfigError(f"{name} is {share}; it must be above 0 and at most 1")
    for name, number in (("--price-per-hour", question.price_per_hour), ("--tflops", question.tflops)):
        if number is not None and not number > 0:
            raise ConfigError(f"{name} is {number}; it must be above 0")
    if question.max_kl is not None and question.max_kl < 0:
        raise ConfigError(f"--max-kl is {question.max_kl}; it must be zero or more")
