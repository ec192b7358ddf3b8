"""Inject random faults, drawn from a seed, into a cluster of real services, and check invariants after
each."""
