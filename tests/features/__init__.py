"""Test features of vLLM's API on two real workers: compare migrated streams with undisturbed ones."""
