"""Workloads: real traces and generators from published statistics."""
