"""Measuring an engine with requests of the worker's own."""
