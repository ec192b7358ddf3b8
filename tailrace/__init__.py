"""Tailrace: the control plane of a fleet of vLLM instances."""

__version__ = "0.1.0"
