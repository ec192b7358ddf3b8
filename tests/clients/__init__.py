"""Real clients against a fleet whose requests move, and against plain `vllm serve`: compare the answers."""
