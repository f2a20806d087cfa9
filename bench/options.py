"""What every engine is told when it is loaded, so that it can hold the largest cell and no more."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cells import Cell
from bench.model import Subject
from bench.turns import log


def load_options(arguments: argparse.Namespace, subject: Subject, cells: Sequence[Cell]) -> dict[str, Any]:
    """What engines need to know to hold the largest of ``cells``."""
    lengths = {cell: cell.context + new_tokens(arguments, cell) for cell in cells}
    tokens = max(cell.sequences * length for cell, length in lengths.items())
    served = any(cell.phase == "served" for cell in cells)
    return {
        "model": arguments.model,
        "directory": str(subject.directory),
        "vocab_size": subject.vocab_size,
        "elements": subject.cost.elements,
        "max_model_len": max(lengths.values()),
        "max_sequences": max(cell.sequences for cell in cells),
        # What our workers fit their arenas to; None where they take cache_bytes as the server does, to be its equals.
        "loads": None if served else [(cell.sequences, length) for cell, length in lengths.items()],
        # fp32 at most, with room for half-filled blocks and for what earlier rounds left cached.
        "cache_bytes": int(1.25 * tokens * subject.cost.elements * 4) + (256 << 20),
        "steps": arguments.steps,
        "answer_tokens": arguments.answer_tokens,
        "threads": arguments.threads,
        "processors": sorted(os.sched_getaffinity(0))[: arguments.threads],
        "settings": dict(arguments.settings),
        "vllm_dtype": arguments.vllm_dtype,
        "zero_prompts": arguments.zero_prompts,
    }


def new_tokens(arguments: argparse.Namespace, cell: Cell) -> int:
    """Positions beyond the prompt: in decode also for those that start while others' prompts are finished."""
    if cell.phase == "decode":
        return int(arguments.steps) + 1 + cell.sequences
    return 1 if cell.phase == "prefill" else int(arguments.answer_tokens)


def llama_options(arguments: argparse.Namespace, subject: Subject) -> dict[str, Any]:
    """What llama.cpp needs: its programs, and the model in F16, made once and kept in the cache directory."""
    gguf: Path | None = arguments.llama_gguf
    if gguf is None and arguments.llama_bin is not None:
        from bench.f16 import write_f16
        from kvloom.models.cachedir import cache_directory
        from kvloom.models.sources import package_file

        cache = cache_directory(None)
        source: Path | None = None
        if arguments.model.startswith("package:"):
            source = package_file(arguments.model.removeprefix("package:"), cache)
        elif arguments.model.endswith(".gguf"):
            source = Path(arguments.model)
        if source is not None:
            gguf = cache / "bench" / f"{subject.directory.name}-f16.gguf"  # named after the file's content
            if not gguf.exists():
                log(f"writing {gguf}")
                write_f16(source, gguf)
    return {
        "gguf": gguf and str(gguf.resolve()),
        "llama_bin": arguments.llama_bin and str(arguments.llama_bin.resolve()),
        "llama_cache_type": arguments.llama_cache_type,
    }
