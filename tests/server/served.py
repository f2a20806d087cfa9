"""A server over the fake engine in a process of its own, for signals: ``python -m tests.server.served``.

Prints its port once it serves. Arguments: seconds to load, seconds per step, drain timeout.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time

from kvloom.core.errors import CorruptModelError
from kvloom.server.config import ServerConfig
from kvloom.server.launch import Runner, bind
from tests.server.fake import FakeEngine, byte_tokenizer


def main(load_seconds: float, step_seconds: float, drain_timeout: float) -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    config = ServerConfig(port=0, drain_timeout=drain_timeout)
    listener = bind(config.host, config.port)
    print(listener.getsockname()[1], flush=True)
    tokenizer = byte_tokenizer()

    def load() -> FakeEngine:
        if load_seconds < 0:
            raise CorruptModelError("the model is missing a shard")
        time.sleep(load_seconds)
        return FakeEngine(tokenizer, step_seconds=step_seconds)

    async def run() -> int:
        return await Runner(config, listener, load, lambda *_: print("ready", flush=True)).run()

    try:
        return asyncio.run(run())
    except CorruptModelError as error:
        print(f"refused: {error}", flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main(*map(float, sys.argv[1:])))
