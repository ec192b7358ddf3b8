"""The fleet-wide prefix cache: names of KV blocks, and an index of their locations (docs/cache.md)."""
