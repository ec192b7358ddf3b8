"""Scheduling policies: a class in a file each, found by name through the entry point `tailrace.policies`."""
