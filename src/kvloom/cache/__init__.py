"""The cache: one arena of bytes, slabs of spans, the prefix index, eviction, and their manager."""
