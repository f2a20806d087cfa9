"""What the HTTP server is built from, apart from the engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.core.errors import ConfigError

MIN_BODY_BYTES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Address, keys and limits of the server.

    ``api_keys``: with at least one, every route but ``/health`` asks for a key, and each key has a
    prefix cache of its own. ``served_model_names``: the names a request may ask for; empty takes
    the engine's name of the model. ``drain_timeout`` is how many seconds running requests get after
    the first Ctrl-C. ``cors_origins`` empty leaves CORS off. ``stall_timeout`` is how many seconds
    a client may leave a full socket unread before its request is dropped.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    drain_timeout: float = 30.0
    max_body_bytes: int = 8 * 1024 * 1024
    cors_origins: tuple[str, ...] = ()
    access_log: bool = True
    stall_timeout: float = 300.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be between 0 (any free one) and 65535")
        if not 0 <= self.drain_timeout <= 86400:
            raise ConfigError(f"drain_timeout is {self.drain_timeout} s; it must be between 0 and 86400")
        if not 0 < self.stall_timeout <= 86400:
            raise ConfigError(f"stall_timeout is {self.stall_timeout} s; it must be above 0 and at most 86400")
        if self.max_body_bytes < MIN_BODY_BYTES:
            raise ConfigError(f"max_body_bytes is {self.max_body_bytes}; it must be at least {MIN_BODY_BYTES}")
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                raise ConfigError("an API key is empty or holds characters that an HTTP header cannot carry")
        if any(not name for name in self.served_model_names):
            raise ConfigError("served_model_name is empty; leave it out to serve under the model's own name")
