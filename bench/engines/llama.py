"""llama.cpp as a worker: a round is one run of its own ``llama-batched-bench``, on F16 weights with flash attention."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from bench.cells import Cell
from bench.protocol import serve

# Bytes per value, block scales included.
CACHE_TYPES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_0": 22 / 32, "q4_0": 18 / 32}
PADDING = 256  # tokens; each sequence's cache is rounded up to it


class Llama:
    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        if options["llama_bin"] is None:
            raise ValueError("give the directory of its programs with --llama-bin")
        directory = Path(options["llama_bin"])
        self.bench = directory / "llama-batched-bench"
        if not self.bench.exists():
            raise FileNotFoundError(f"{directory} holds no llama-batched-bench")
        self.links = tempfile.TemporaryDirectory(prefix="kvloom-bench-")
        link_libraries(directory, Path(self.links.name))
        path = os.environ.get("LD_LIBRARY_PATH")
        self.environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, (self.links.name, path)))}
        self.threads: int = options["threads"]
        self.steps: int = options["steps"]
        self.cache_type: str = options["llama_cache_type"]
        if options["gguf"] is None:
            raise ValueError("the model comes from no GGUF file; give one in F16 with --llama-gguf")
        self.model: str = options["gguf"]
        said = self._run([str(self.bench), "--version"])
        version = re.search(r"version: (\S+)", said)
        return {
            "version": version.group(1) if version else "unknown",
            "dtype": "float16",
            "cache_element_bytes": CACHE_TYPES[self.cache_type],
            "notes": ["prompts of a decode cell are computed once and copied; a shared one is shared whole"],
        }

    def prepare(self, cell: Cell) -> None:
        if cell.phase == "served":
            raise ValueError("not measured over HTTP")
        self.cell = cell
        self._measure(["-npp", "16", "-ntg", "1", "-npl", "1", "-c", str(PADDING)])  # brings the file into memory

    def round(self, number: int) -> dict[str, Any]:
        cell = self.cell
        new_tokens = self.steps if cell.phase == "decode" else 1
        flags = ["-npp", str(cell.context), "-ntg", str(new_tokens), "-npl", str(cell.sequences)]
        flags += ["-c", str(context_size(cell, new_tokens))]
        if cell.phase == "decode" and cell.sequences > 1:
            # Computes one prompt for all; without -kvu every sequence then has its own copy of it.
            flags += ["-pps", *(["-kvu"] if cell.shared else [])]
        found = self._measure(flags)
        memory = {"rss_peak_bytes": self.peak, "rss_by": "ru_maxrss"}
        if cell.phase == "decode":
            return {"seconds": found["t_tg"], "units": new_tokens, "memory": memory}
        return {"seconds": found["t_pp"], "units": cell.context * cell.sequences, "memory": memory}

    def release(self) -> None:
        pass

    def _measure(self, flags: list[str]) -> dict[str, float]:
        command = [str(self.bench), "-m", self.model, "-t", str(self.threads), "-tb", str(self.threads)]
        command += ["-b", "2048", "-ub", "512", "-fa", "on", "-ctk", self.cache_type, "-ctv", self.cache_type]
        return parse_result(self._run([*command, *flags, "--output-format", "jsonl"]))

    def _run(self, command: list[str]) -> str:
        """What the program says; ``peak`` is then the most bytes that it had resident, its mapped weights included."""
        # A file takes both streams without a thread, so that the process can be waited for along with its usage.
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            output.seek(0)
            said = output.read().decode(errors="replace")
        self.peak = usage.ru_maxrss * 1024
        if process.returncode != 0:
            last = next((line for line in reversed(said.splitlines()) if line.strip()), "nothing")
            raise RuntimeError(f"{Path(command[0]).name} ended with status {process.returncode}: {last}")
        return said


def context_size(cell: Cell, new_tokens: int) -> int:
    """Tokens of cache to ask for: one pool where a prompt is shared, else the same for each sequence."""
    if cell.shared:
        return -(-(cell.context + cell.sequences * new_tokens) // PADDING) * PADDING
    return cell.sequences * -(-(cell.context + new_tokens + 1) // PADDING) * PADDING


def parse_result(text: str) -> dict[str, float]:
    """The figures in llama-batched-bench's JSON line.

    Raises:
        RuntimeError: there is none; the cell did not fit its cache.
    """
    for line in text.splitlines():
        if line.startswith("{") and '"t_tg"' in line:
            found = json.loads(line)
            return {key: float(value) for key, value in found.items() if isinstance(value, int | float)}
    raise RuntimeError("llama-batched-bench printed no result")


def link_libraries(directory: Path, links: Path) -> None:
    """Names without the last numbers of libX.so.1.2.3, which the loader asks for and Python wheels cannot hold."""
    for library in directory.glob("lib*.so.*"):
        name = library.name
        while not name.endswith(".so"):
            name = name.rpartition(".")[0]
            link = links / name
            if not (directory / name).exists() and not link.is_symlink():
                link.symlink_to(library)


if __name__ == "__main__":
    serve(Llama())
