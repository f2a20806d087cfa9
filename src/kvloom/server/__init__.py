"""The OpenAI-compatible HTTP server: protocol, routes, streaming and metrics.

``app.create_app`` builds the application around an engine; ``launch.serve`` binds, loads, runs and
drains it for ``kvloom serve``. Pydantic is used in ``protocol`` only.
"""
