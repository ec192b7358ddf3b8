"""Compare the policies on real vLLM engines, with every answer checked (docs/results.md)."""
