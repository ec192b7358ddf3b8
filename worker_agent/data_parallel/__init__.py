"""Ranks of a data-parallel deployment: how they meet, step together, and notice that one is lost."""
