"""`tailrace validate`: a recorded run of a real engine, replayed in the simulator."""

from simulator.cli.checkout import experiment

validate_command = experiment("validate", "experiments.validation.command:validate_command")
