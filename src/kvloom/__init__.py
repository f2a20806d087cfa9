"""kvloom: a KV cache that is paged, shared, and planned to the byte, in an engine that serves it."""
