"""Features of vLLM's API on two real workers: streams that are moved against undisturbed ones."""
