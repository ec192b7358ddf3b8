"""The papers' claims, checked in the simulator."""
