"""Quality gates: what an approximate cache costs, measured through the engine."""
