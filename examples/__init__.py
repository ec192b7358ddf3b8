"""Runnable examples; each says how at its top."""
