"""Describe what was simulated."""

from __future__ import annotations

from collections.abc import Iterable

from simulator.scenario import Fleet, Scenario
from tailrace.policy.parameters import Value, format_value


def describe_fleet(scenario: Scenario) -> str:
    """Describe the fleet in a phrase."""
    return f"· {describe_instances(scenario.fleet)}"


def describe_instances(fleet: Fleet) -> str:
    """Describe the number and kind of the instances."""
    return f"{fleet.instances} instance{'' if fleet.instances == 1 else 's'} of {fleet.profile}"


def setup_rows(scenario: Scenario) -> list[tuple[str, str]]:
    """Return (setting, value) rows of the policy's setup and the fleet."""
    setup, fleet = scenario.setup(), scenario.fleet
    share = setup.prefill_share
    rows = [
        ("Policy", scenario.policy),
        ("Parameters", format_parameters(scenario.parameters) or "defaults"),
        ("Order inside an instance", setup.intra_name),
        ("Pools at the start", "none" if share is None else f"{share:.0%} of the instances prefill"),
        ("A migration's target is full", setup.migration.when_full.value),
        ("Predictions of output lengths", setup.predicts),
        ("Instances", describe_instances(fleet)),
        ("Cost of unequal lengths", fleet.penalty),
        ("Seed", f"{scenario.options.seed}"),
    ]
    return rows


def format_parameters(parameters: Iterable[tuple[str, Value]]) -> str:
    """Format parameters as `--set` accepts them."""
    return ", ".join(f"{name}={format_value(value)}" for name, value in parameters)
