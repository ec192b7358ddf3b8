"""The commands of the simulator: `tailrace simulate`, `compare`, `claims`, `validate`."""
