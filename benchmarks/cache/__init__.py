"""The prefix cache of real vLLM workers: by `policies`, against vLLM's `router`, and what a `pull` saves."""
