"""One vLLM (or simulated) engine: data path, KV transfer, both ends of a migration."""
