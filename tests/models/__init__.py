"""Migrate streams of tiny models of many architectures, in each of vLLM's run configurations: `make
test-models`."""
