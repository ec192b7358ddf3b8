"""The prefix cache of real vLLM workers: what a `pull` saves, and placement against vLLM's `router`."""
