"""`tailrace claims`: the papers' numbers next to ours."""

from simulator.cli.checkout import experiment

claims_command = experiment("claims", "experiments.claims.command:claims_command")
