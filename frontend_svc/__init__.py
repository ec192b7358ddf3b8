"""Holds each stream for its whole life: the fleet's engine core as seen by vLLM's API server."""
