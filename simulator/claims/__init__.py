"""The papers' numbers, run again in the simulator."""
