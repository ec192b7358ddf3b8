"""Discrete-event cluster simulator: the same policies under a virtual clock."""
