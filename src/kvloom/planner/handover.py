"""The choice in other words: kvloom YAML, and launch flags of five other servers.

Only flags that each engine documents are written, and what it cannot express is listed.
Versions: vLLM 0.2x-0.3x, SGLang 0.5.20, TensorRT-LLM main of autumn 2026, TGI 3, llama.cpp of
September 2026.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor

from kvloom.planner.choose import Choice, Pipeline
from kvloom.planner.setting import Setting

Codecs = Mapping[str, str]

_VLLM: Codecs = {
    "raw": "auto",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "int8": "int8_per_token_head",
    "int4": "int4_per_token_head",
    "turboquant4": "turboquant_4bit_nc",
    "turboquant3": "turboquant_3bit_nc",
}
_SGLANG: Codecs = {"raw": "auto", "bfloat16": "bfloat16", "fp8": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
_TENSORRT: Codecs = {"raw": "auto", "fp8": "fp8"}
_TGI: Codecs = {"raw": "", "fp8": "fp8_e4m3fn", "fp8_e5m2": "fp8_e5m2"}
_LLAMA_CPP: Codecs = {
    "raw": "f16",
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "q8_0": "q8_0",
    "q4_0": "q4_0",
    "int8": "q8_0",
    "int4": "q4_0",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How one engine is started; ``cannot`` names what it does not express, ``files`` what it needs."""

    engine: str
    command: str
    cannot: tuple[str, ...]
    notes: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()


def kvloom_yaml(pipeline: Pipeline, setting: Setting) -> str:
    """The choice as the ``pipeline:`` section of a kvloom configuration file."""
    form = pipeline.form
    codec = form.codec
    if codec.name.startswith("k="):
        key, value = (part.split("=")[1] for part in codec.name.split(","))
        written = f"{{k: {key}, v: {value}}}"
    else:
        written = codec.name
    lines = []
    if not pipeline.served:
        lines.append("# planned: this version of kvloom does not serve presses and tiers")
    lines += ["pipeline:", f"  block_size: {form.block_size}", f"  codec: {written}"]
    protect = []
    if form.sink_tokens or form.recent_tokens:
        protect += [f"sink_tokens: {form.sink_tokens}", f"recent_tokens: {form.recent_tokens}"]
    if form.protect_layers:
        protect.append(f"layers: [{', '.join(str(layer) for layer in sorted(form.protect_layers))}]")
    if protect:
        lines.append(f"  protect: {{{', '.join(protect)}}}")
    if pipeline.press:
        lines.append(f"  press: {{name: {pipeline.press}, keep: {pipeline.keep:g}}}")
    if pipeline.tiers:
        entries = []
        for tier in pipeline.tiers:
            extra = ", path: kv/" if tier.name == "disk" else ""
            entries.append(f"{{kind: {tier.name}{extra}, size: {_size(tier.num_bytes)}}}")
        lines.append(f"  tiers: [{', '.join(entries)}]")
    lines.append(f"  prefix_cache: {str(pipeline.prefix_cache).lower()}")
    lines += [f"model: {setting.hub_name}", f"max_model_len: {setting.tokens}", f"max_sequences: {_batch(setting)}"]
    return "\n".join(lines) + "\n"


def launches(choices: Sequence[Choice], setting: Setting) -> tuple[Launch, ...]:
    """Launch commands for the other engines, each with the best codec that it has and that is accepted there.

    They keep no tokens raw: a codec's loss counts as it is then. The batch is the codec's, the rest the first choice's.
    """
    engines: tuple[tuple[Callable[[Pipeline, Setting], Launch], Codecs], ...] = (
        (_vllm, _VLLM),
        (_sglang, _SGLANG),
        (_tensorrt, _TENSORRT),
        (_tgi, _TGI),
        (_llama_cpp, _LLAMA_CPP),
    )
    return tuple(_launch(build, table, choices, setting) for build, table in engines)


def _launch(
    build: Callable[[Pipeline, Setting], Launch], table: Codecs, choices: Sequence[Choice], setting: Setting
) -> Launch:
    best = choices[0].pipeline
    wanted = best.form.codec.name
    if wanted in table and choices[0].accepted_bare:
        return build(best, setting)
    for choice in choices:
        name = choice.pipeline.form.codec.name
        if choice.accepted and choice.accepted_bare and name in table:
            replaced = replace(best, form=choice.pipeline.form, press=None, keep=None)
            launch = build(replaced, replace(setting, batch=max(1, choice.batch)))
            why = "not accepted with every token encoded" if wanted in table else "not available there"
            missing = [f"codec {wanted}: {why}; {name}, the next that is accepted with every token encoded, instead"]
            if best.press:
                missing.append(f"press {best.press}")
            return replace(launch, cannot=(*missing, *launch.cannot))
    return build(best, setting)


def _size(num_bytes: int) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return str(num_bytes)


def _batch(setting: Setting) -> int:
    return max(1, setting.batch)


def _codec(pipeline: Pipeline, table: Codecs, cannot: list[str]) -> str | None:
    """The engine's own name for the codec, or None with the reason noted."""
    name = pipeline.form.codec.name
    if name in table:
        return table[name]
    cannot.append(f"codec {name}: not available there; left at the engine's 16-bit default")
    return None


def _common_limits(pipeline: Pipeline, cannot: list[str], *, press: bool = True, layers: bool = True) -> None:
    form = pipeline.form
    if (form.sink_tokens or form.recent_tokens) and not form.lossless:
        cannot.append(f"first {form.sink_tokens} and last {form.recent_tokens} tokens raw")
    if layers and form.protect_layers:
        cannot.append("protected layers")
    if press and pipeline.press:
        cannot.append(f"press {pipeline.press}")


def _tier_bytes(pipeline: Pipeline, *names: str) -> int:
    return sum(tier.num_bytes for tier in pipeline.tiers if tier.name in names)


def _vllm(pipeline: Pipeline, setting: Setting) -> Launch:
    cannot: list[str] = []
    notes: list[str] = []
    flags = [f"vllm serve {setting.hub_name}", f"--max-model-len {setting.tokens}", f"--max-num-seqs {_batch(setting)}"]
    flags += _parallel_flags(setting, "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
    codec = _codec(pipeline, _VLLM, cannot)
    if codec:
        flags.append(f"--kv-cache-dtype {codec}")
        if codec.startswith("turboquant"):
            notes.append("vLLM's TurboQuant stores values unrotated and skips the first and last two layers")
        if codec.startswith("fp8"):
            notes.append("vLLM's fp8 uses one scale per tensor unless the checkpoint brings scales")
    _common_limits(pipeline, cannot, layers=False)
    if pipeline.form.protect_layers and codec not in (None, "auto"):
        listed = " ".join(str(layer) for layer in sorted(pipeline.form.protect_layers))
        flags.append(f"--kv-cache-dtype-skip-layers {listed}")
    flags.append("--enable-prefix-caching" if pipeline.prefix_cache else "--no-enable-prefix-caching")
    host = _tier_bytes(pipeline, "host")
    if host:
        flags.append(f"--kv-offloading-size {host // 2**30} --kv-offloading-backend native")
    if _tier_bytes(pipeline, "disk", "redis", "object"):
        cannot.append("lower tiers by flag: they need a --kv-transfer-config with TieringOffloadingSpec, or LMCache")
    if pipeline.form.block_size in (16, 32, 64, 128):
        flags.append(f"--block-size {pipeline.form.block_size}")
    return Launch(engine="vllm", command=" ".join(flags), cannot=tuple(cannot), notes=tuple(notes))


def _sglang(pipeline: Pipeline, setting: Setting) -> Launch:
    cannot: list[str] = []
    flags = [
        f"python -m sglang.launch_server --model-path {setting.hub_name}",
        f"--context-length {setting.tokens}",
        f"--max-running-requests {_batch(setting)}",
    ]
    flags += _parallel_flags(setting, "--tp-size", "--pp-size", "--dp-size")
    codec = _codec(pipeline, _SGLANG, cannot)
    if codec:
        flags.append(f"--kv-cache-dtype {codec}")
    _common_limits(pipeline, cannot)
    if not pipeline.prefix_cache:
        flags.append("--disable-radix-cache")
    host = _tier_bytes(pipeline, "host")
    if host:
        flags.append(f"--enable-hierarchical-cache --hicache-size {floor(host / 1e9)}")
    if _tier_bytes(pipeline, "disk"):
        flags.append("--hicache-storage-backend file")
        cannot.append("a size limit for the disk tier")
    if _tier_bytes(pipeline, "redis", "object"):
        cannot.append("redis or object tier by flag: it needs a mooncake, nixl or dynamic backend")
    return Launch(engine="sglang", command=" ".join(flags), cannot=tuple(cannot))


def _tensorrt(pipeline: Pipeline, setting: Setting) -> Launch:
    cannot: list[str] = []
    codec = _codec(pipeline, _TENSORRT, cannot)
    lines = ["kv_cache_config:", f"  enable_block_reuse: {str(pipeline.prefix_cache).lower()}"]
    if codec:
        lines.append(f"  dtype: {codec}")
    host = _tier_bytes(pipeline, "host")
    if host:
        lines.append(f"  host_cache_size: {host}")
    if _tier_bytes(pipeline, "disk", "redis", "object"):
        cannot.append("disk, redis and object tiers by this file: they go through the connector API")
    if pipeline.form.block_size in (32, 64, 128):
        lines.append(f"  tokens_per_block: {pipeline.form.block_size}")
    _common_limits(pipeline, cannot)
    if setting.parallel.dp > 1:
        cannot.append(f"data parallelism {setting.parallel.dp}: start as many servers")
    flags = [
        f"trtllm-serve {setting.hub_name}",
        f"--max_seq_len {setting.tokens}",
        f"--max_batch_size {_batch(setting)}",
        f"--tp_size {setting.parallel.tp}",
        f"--pp_size {setting.parallel.pp}",
        "--extra_llm_api_options kv.yaml",
    ]
    return Launch(
        engine="tensorrt-llm",
        command=" ".join(flags),
        cannot=tuple(cannot),
        files=(("kv.yaml", "\n".join(lines) + "\n"),),
    )


def _tgi(pipeline: Pipeline, setting: Setting) -> Launch:
    cannot: list[str] = []
    flags = [
        f"text-generation-launcher --model-id {setting.hub_name}",
        f"--max-total-tokens {setting.tokens}",
        f"--max-input-tokens {max(1, setting.tokens - 1)}",
        f"--max-concurrent-requests {_batch(setting)}",
    ]
    if setting.parallel.tp > 1:
        flags.append(f"--num-shard {setting.parallel.tp}")
    if setting.parallel.pp > 1:
        cannot.append(f"pipeline parallelism {setting.parallel.pp}")
    if setting.parallel.dp > 1:
        cannot.append(f"data parallelism {setting.parallel.dp}: start as many servers")
    codec = _codec(pipeline, _TGI, cannot)
    if codec:
        flags.append(f"--kv-cache-dtype {codec}")
    _common_limits(pipeline, cannot)
    if pipeline.tiers:
        cannot.append("tiers below the device")
    if pipeline.form.block_size != 16:
        cannot.append("block size")
    prefix = "1" if pipeline.prefix_cache else "0"
    return Launch(engine="tgi", command=f"PREFIX_CACHING={prefix} " + " ".join(flags), cannot=tuple(cannot))


def _llama_cpp(pipeline: Pipeline, setting: Setting) -> Launch:
    cannot: list[str] = []
    notes: list[str] = []
    slots = _batch(setting)
    flags = ["llama-server -m MODEL.gguf", f"-c {setting.tokens * slots}", f"-np {slots}", "-fa on"]
    name = pipeline.form.codec.name
    if name.startswith("k="):
        parts = dict(part.split("=") for part in name.split(","))
        key, value = _LLAMA_CPP.get(parts["k"]), _LLAMA_CPP.get(parts["v"])
    else:
        key = value = _LLAMA_CPP.get(name)
    if key and value:
        flags.append(f"-ctk {key} -ctv {value}")
        if {key, value} & {"q4_0"}:
            notes.append("llama.cpp rotates quantised caches with a Hadamard matrix since PR 21038")
    else:
        cannot.append(f"codec {name}: not available there; left at f16")
    if setting.parallel.devices > 1:
        cannot.append("this tensor, pipeline or data parallelism: see --split-mode and --tensor-split")
    _common_limits(pipeline, cannot)
    host = _tier_bytes(pipeline, "host")
    if host:
        flags.append(f"--cache-ram {host // 2**20}")
    if _tier_bytes(pipeline, "disk"):
        flags.append("--slot-save-path kv/")
        cannot.append("automatic disk tier: slots are saved and restored by request")
    if _tier_bytes(pipeline, "redis", "object"):
        cannot.append("redis and object tiers")
    cannot.append("paging and sharing of blocks between requests: each slot has its own cells")
    notes.append("-c is the total over all slots")
    return Launch(engine="llama.cpp", command=" ".join(flags), cannot=tuple(cannot), notes=tuple(notes))


def _parallel_flags(setting: Setting, tp: str, pp: str, dp: str) -> list[str]:
    degrees = ((tp, setting.parallel.tp), (pp, setting.parallel.pp), (dp, setting.parallel.dp))
    return [f"{flag} {degree}" for flag, degree in degrees if degree > 1]


def handover_report(choices: Sequence[Choice], setting: Setting) -> dict[str, object]:
    """YAML and launches of the first choice as plain values, at the batch it was rated for."""
    best = choices[0]
    setting = replace(setting, batch=max(1, best.batch))
    now = next((choice for choice in choices if choice.pipeline.served and choice.fits is not False), None)
    return {
        "kvloom_yaml": kvloom_yaml(best.pipeline, setting),
        "kvloom_yaml_served_now": None
        if now is None
        else kvloom_yaml(now.pipeline, replace(setting, batch=max(1, now.batch))),
        "engines": {
            launch.engine: {
                "command": launch.command,
                "files": dict(launch.files),
                "cannot_express": list(launch.cannot),
                "notes": list(launch.notes),
            }
            for launch in launches(choices, setting)
        },
    }
