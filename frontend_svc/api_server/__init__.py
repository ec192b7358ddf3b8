"""vLLM's API server (HTTP, templates, tokenizer, detokenizer, parsers) as a child process."""
