"""Scheduling policies: one class in one file each, found by name through the entry point `tailrace.policies`."""
