"""One worker process per engine, all speaking ``bench.protocol``."""
