"""A cluster of real services under faults at random, drawn by a seed, with its invariants after each."""
