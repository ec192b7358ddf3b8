"""Whole fleets of real processes."""
