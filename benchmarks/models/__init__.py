"""Tiny models of many architectures, each moved about in each of vLLM's ways to run: `make test-models`."""
