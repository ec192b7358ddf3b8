"""How far the simulator is from runs of a real engine."""
