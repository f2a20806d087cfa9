"""``kvloom serve``: from settings to a running server and its start-up report."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading

from kvloom.server.banner import base_url, curl_line, document, print_banner, rows
from kvloom.server.interface import ServingEngine
from kvloom.server.launch import Runner, bind
from kvloom.server.settings import Settings
from kvloom.server.state import Serving


class WithoutProbes(logging.Filter):
    """Drops health checks and scrapes from the access log: they come every few seconds and drown the rest."""

    def filter(self, record: logging.LogRecord) -> bool:
        path = record.args[2] if isinstance(record.args, tuple) and len(record.args) > 2 else ""
        return path not in ("/health", "/metrics")


def serve(settings: Settings, *, as_json: bool) -> int:
    """Run until told to stop; returns the exit status.

    Raises:
        ConfigError: the port is in use; found out before the model is loaded.
        KvloomError: the model cannot be loaded.
    """
    config = settings.server
    logging.getLogger("uvicorn.access").addFilter(WithoutProbes())
    listener = bind(config.host, config.port)

    def load() -> ServingEngine:
        from kvloom.engine.async_engine import AsyncEngine

        return AsyncEngine.create(settings.engine)

    def report(engine: ServingEngine, serving: Serving, port: int) -> None:
        names = serving.model_names
        url = base_url(config.host, port)
        chat = bool(getattr(engine.tokenizer, "chat_template", None))
        curl = curl_line(url, names[0], chat=chat, with_key=bool(config.api_keys))
        if as_json:
            print(json.dumps(document(engine.info, url, names, curl)), flush=True)
        else:
            print_banner(sys.stdout, rows(engine.info, url, names), curl)

    print(f"loading {settings.engine.model}; /health says 503 until it is ready", file=sys.stderr, flush=True)

    async def run() -> int:
        return await Runner(config, listener, load, report).run()

    status = asyncio.run(run())
    if any(thread.name == "kvloom-load" for thread in threading.enumerate()):
        # Told to stop while loading: the thread is inside a library and cannot be asked to end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
