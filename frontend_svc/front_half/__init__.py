"""vLLM's front half (HTTP, templates, tokenizer, detokenizer, parsers) as a child process."""
