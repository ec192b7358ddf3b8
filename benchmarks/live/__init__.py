"""Live against simulated: one slice of a trace through the real services and through the simulator."""
