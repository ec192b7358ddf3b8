"""Compare live and simulated fleets: part of a trace through the real services and through the simulator."""
