"""The simulator's error against runs of a real engine."""
