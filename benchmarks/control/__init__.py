"""Measure the control plane: real monitor and scheduler, synthetic workers and front ends."""
