"""Workloads: real traces, and generators based on published statistics."""
