"""The application: routes, layers and state put together."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from kvloom import __version__
from kvloom.server.auth import ApiKeys, AuthMiddleware
from kvloom.server.config import ServerConfig
from kvloom.server.edge import EdgeMiddleware
from kvloom.server.errors import install_error_handlers
from kvloom.server.interface import ServingEngine
from kvloom.server.routes import router
from kvloom.server.state import Serving


def create_app(engine: ServingEngine | None = None, config: ServerConfig | None = None) -> FastAPI:
    """An ASGI application that serves ``engine``, already started.

    Without one it answers 503 until ``app.state.serving.attach(engine)``. Layers from the outside
    in: request id and counts, CORS if asked for, API key, errors, routes.
    """
    serving = Serving(config or ServerConfig(), engine)
    # Bodies are read and checked by hand (see protocol), so FastAPI has no schemas to show.
    app = FastAPI(title="kvloom", version=__version__, openapi_url=None, redirect_slashes=False)
    app.state.serving = serving
    app.include_router(router)
    install_error_handlers(app)
    app.add_middleware(AuthMiddleware, keys=ApiKeys(serving.config.api_keys), metrics=serving.metrics)
    if serving.config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(serving.config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(EdgeMiddleware, metrics=serving.metrics)
    return app
