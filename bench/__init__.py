"""Measurements: our figure, a peer's and the physical bound, from the same run (docs/benchmarks.md)."""
