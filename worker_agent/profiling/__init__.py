"""Profiling of an engine with probe requests."""
