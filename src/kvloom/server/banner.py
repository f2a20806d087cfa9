"""What ``kvloom serve`` says once it serves: what was built, to the byte, and a line to try it with."""

from __future__ import annotations

import json
import shlex
from typing import Any, TextIO

from kvloom import __version__
from kvloom.core.sizes import format_bytes
from kvloom.core.stats import EngineInfo
from kvloom.core.storage import raw_tokens


def base_url(host: str, port: int) -> str:
    """Where this machine reaches the server; wildcard addresses are reached by loopback."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def curl_line(url: str, model: str, *, chat: bool, with_key: bool) -> str:
    """A command that works when pasted. A key is read from the shell, never printed."""
    question = "What does a KV cache store?"
    body: dict[str, Any] = {"model": model, "max_tokens": 64, "temperature": 0}
    if chat:
        route, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": question}]
    else:
        route, body["prompt"] = "/v1/completions", "A KV cache stores"
    parts = ["curl", url + route, "-H", "'Content-Type: application/json'"]
    if with_key:
        parts += ["-H", '"Authorization: Bearer $KVLOOM_API_KEY"']
    return " ".join([*parts, "-d", shlex.quote(json.dumps(body))])


def document(info: EngineInfo, url: str, models: tuple[str, ...], curl: str) -> dict[str, Any]:
    """The start-up report as plain data, for ``--json``."""
    return {
        "version": __version__,
        "url": url,
        "models": list(models),
        "model": info.model,
        "model_type": info.model_type,
        "verified": info.verified,
        "device": info.device,
        "dtype": info.dtype,
        "kernels": info.kernels,
        "kernel_variant": info.kernel_variant,
        "step": info.step,
        "weight_bytes": info.weight_bytes,
        "pipeline": info.pipeline,
        "codec": info.codec,
        "protect": {
            "sink_tokens": info.sink_tokens,
            "recent_tokens": info.recent_tokens,
            "layers": list(info.protect_layers),
            "guarded_layers": list(info.guarded_layers),
        },
        "bits_per_value": info.bits_per_value,
        "block_size": info.block_size,
        "deterministic": info.deterministic,
        "rounding_noise": info.rounding_noise,
        "max_model_len": info.max_model_len,
        "vocab_size": info.vocab_size,
        "bytes_per_token": {"predicted": info.predicted_bytes_per_token, "actual": info.actual_bytes_per_token},
        "arena_bytes": {"predicted": info.predicted_arena_bytes, "actual": info.actual_arena_bytes},
        "slab_bytes": info.slab_bytes,
        "num_slabs": info.num_slabs,
        "sequences_at_max_len": info.sequences_at_max_len,
        "groups": [dict(group) for group in info.groups],
        "curl": curl,
    }


def rows(info: EngineInfo, url: str, models: tuple[str, ...]) -> list[tuple[str, str]]:
    """The start-up report for people: what and value, line by line."""
    kernels = f"{info.kernels} ({info.kernel_variant})" if info.kernel_variant else info.kernels
    noise = "none, deterministic" if info.deterministic else f"{info.rounding_noise:.3g} on logits"
    served = [] if models == (info.model,) else [("served as", ", ".join(models))]
    return [
        ("model", f"{info.model} ({info.model_type}{'' if info.verified else ', NOT VERIFIED'})"),
        *served,
        ("device", f"{info.device}, {info.dtype}"),
        ("kernels", kernels),
        ("step", info.step),
        ("pipeline", f"{info.pipeline}, blocks of {info.block_size} tokens"),
        ("codec", _codec_text(info)),
        ("context", f"{info.max_model_len} tokens"),
        (
            "cache per token",
            _agreement(info.predicted_bytes_per_token, info.actual_bytes_per_token),
        ),
        ("cache", _agreement(info.predicted_arena_bytes, info.actual_arena_bytes)),
        ("slabs", f"{info.num_slabs} of {info.slab_bytes} bytes ({format_bytes(info.slab_bytes)})"),
        *((f"group {_group_name(group, index)}", _group_text(group)) for index, group in enumerate(info.groups)),
        ("fits", f"{info.sequences_at_max_len} sequences of {info.max_model_len} tokens at once"),
        ("rounding noise", noise),
        ("listening", url),
    ]


def _codec_text(info: EngineInfo) -> str:
    if info.codec == "raw":
        return f"raw, {info.bits_per_value:g} bits a value"
    layers = f"; layers {', '.join(map(str, info.protect_layers))}" if info.protect_layers else ""
    layers += f" ({', '.join(map(str, info.guarded_layers))} by the codec guard)" if info.guarded_layers else ""
    raw = "; ".join(raw_tokens(info.sink_tokens, info.recent_tokens))
    return f"{info.codec}, {info.bits_per_value:.3g} bits a value with side data; raw: {raw}{layers}"


def _agreement(predicted: int, actual: int) -> str:
    verdict = "as predicted" if predicted == actual else f"BUT {predicted} WERE PREDICTED, please report this"
    return f"{actual} bytes ({format_bytes(actual)}), {verdict}"


def _group_name(group: Any, index: int) -> str:
    return str(group.get("name", index))


def _group_text(group: Any) -> str:
    return ", ".join(
        f"{key.replace('_', ' ')} {value}" for key, value in group.items() if key != "name" and value is not None
    )


def print_banner(stream: TextIO, lines: list[tuple[str, str]], curl: str) -> None:
    """A table on a terminal, plain lines in a pipe; the command stands alone so that it pastes whole."""
    if stream.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"kvloom {__version__}", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, value in lines:
            table.add_row(name, value)
        Console(file=stream).print(table)
    else:
        stream.write(f"kvloom {__version__}\n")
        width = max(len(name) for name, _ in lines)
        stream.writelines(f"{name:<{width}}  {value}\n" for name, value in lines)
    stream.write(f"\nTry it:\n{curl}\n\n")
    stream.flush()
