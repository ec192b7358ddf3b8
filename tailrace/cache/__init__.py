"""One cache for the fleet: names of KV blocks, and where each block is (docs/cache.md)."""
