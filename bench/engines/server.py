"""``kvloom serve`` as a worker: a round is that many concurrent streams from a client process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from bench.cells import Cell, make_prompts
from bench.protocol import serve, tree_cpu_seconds


class Server:
    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        settings = {
            "max_model_len": options["max_model_len"],
            "max_sequences": options["max_sequences"],
            "kv_cache_memory": options["cache_bytes"],
            "num_threads": options["threads"],
            **options["settings"],
        }
        environment = {**os.environ, **{f"KVLOOM_{key.upper()}": str(value) for key, value in settings.items()}}
        # In this worker's process group, which the parent ends.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvloom.cli", "serve", options["model"], "--port", "0", "--json", "--no-access-log"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        text = ""
        for line in self.process.stdout:  # one document, then silence
            text += line
            try:
                document = json.loads(text)
            except json.JSONDecodeError:
                continue
            break
        else:
            raise RuntimeError(f"the server ended with status {self.process.wait()} before it served")
        if "url" not in document:
            raise RuntimeError(document)  # why it does not serve
        self.url: str = document["url"]
        self.answer_tokens: int = options["answer_tokens"]
        self.vocab_size: int = document["vocab_size"]
        elements = options["elements"]
        return {
            "version": document["version"],
            "dtype": document["dtype"],
            "cache_element_bytes": document["bytes_per_token"]["actual"] / elements,
            "engine": document,
        }

    def prepare(self, cell: Cell) -> None:
        self.cell = cell
        self.round(-1)

    def round(self, number: int) -> dict[str, Any]:
        prompts = make_prompts(self.cell, self.vocab_size, number + 1)
        order = {"url": self.url, "prompts": prompts, "max_tokens": self.answer_tokens}
        before = tree_cpu_seconds(self.process.pid)
        done = subprocess.run(
            [sys.executable, "-m", "bench.client"], input=json.dumps(order), capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"the client failed: {done.stderr.strip().splitlines()[-1:]}")
        result = json.loads(done.stdout)
        if result["tokens"] != self.answer_tokens * len(prompts):
            raise RuntimeError(f"the answers have {result['tokens']} tokens")
        return {
            "seconds": result["seconds"],
            "units": result["tokens"],
            "client_cpu_s": result["cpu_seconds"],
            "server_cpu_s": tree_cpu_seconds(self.process.pid) - before,
            "first_token_s": result["first_token_s"],
        }

    def release(self) -> None:
        pass


if __name__ == "__main__":
    serve(Server())
