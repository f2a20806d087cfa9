"""What one server holds: its engine once loaded, its limits, its keys and its metrics."""

from __future__ import annotations

import time
from enum import Enum

from kvloom.core.errors import EngineStoppedError, NotFoundError
from kvloom.server.config import ServerConfig
from kvloom.server.interface import ServingEngine
from kvloom.server.metrics import Collector, ServerMetrics
from kvloom.server.tokenization import Tokenization


class Phase(str, Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Serving:
    """The state behind the routes. Without an engine it is loading and answers 503."""

    def __init__(self, config: ServerConfig, engine: ServingEngine | None = None) -> None:
        self.config = config
        self.metrics = ServerMetrics()
        self.collector = Collector(self.metrics, lambda: self._engine, next(iter(config.served_model_names), None))
        self.draining = False
        self.started_at = time.time()
        self._engine: ServingEngine | None = None
        self._tokenization: Tokenization | None = None
        if engine is not None:
            self.attach(engine)

    def attach(self, engine: ServingEngine) -> None:
        """Serve with ``engine`` from now on."""
        self._tokenization = Tokenization(engine.tokenizer)
        self._engine = engine

    def close(self) -> None:
        if self._tokenization is not None:
            self._tokenization.close()

    @property
    def phase(self) -> Phase:
        if self._engine is None:
            return Phase.DRAINING if self.draining else Phase.LOADING
        if self._engine.failed is not None:
            return Phase.FAILED
        if self.draining:
            return Phase.DRAINING
        return Phase.READY if self._engine.ready else Phase.LOADING

    @property
    def problem(self) -> str | None:
        """Why requests are not served now; None when they are."""
        phase = self.phase
        if phase is Phase.READY:
            return None
        if phase is Phase.LOADING:
            return "the model is still loading; try again in a few seconds"
        if phase is Phase.DRAINING:
            return "the server is shutting down and takes no new requests; try another one"
        assert self._engine is not None
        return f"the engine failed: {self._engine.failed}; restart the server"

    @property
    def engine(self) -> ServingEngine:
        """The engine, ready.

        Raises:
            EngineStoppedError: it is loading, draining or failed.
        """
        problem = self.problem
        if problem is not None or self._engine is None:
            raise EngineStoppedError(problem or "no engine")
        return self._engine

    @property
    def tokenization(self) -> Tokenization:
        if self._tokenization is None:
            raise EngineStoppedError("the model is still loading; try again in a few seconds")
        return self._tokenization

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that requests may ask for; the first is the one answers carry."""
        if self.config.served_model_names:
            return self.config.served_model_names
        return (self.engine.info.model,)

    def resolve_model(self, name: str | None) -> str:
        """The served name for the one asked for; the first when none was.

        Raises:
            NotFoundError: this server does not serve it.
        """
        names = self.model_names
        if name is None:
            return names[0]
        if name not in names:
            raise NotFoundError(
                f"the model {name[:200]!r} is not served here; served: {', '.join(names)}",
                param="model",
                code="model_not_found",
            )
        return name
