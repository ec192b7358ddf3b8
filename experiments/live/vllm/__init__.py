"""Compare the policies on real vLLM engines, with every answer checked (docs/live-results.md)."""
