"""`--set`: parameters of the policies that are simulated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click

from simulator.setups import UnknownSetupError, setup_for
from tailrace.cli.errors import UsageProblem
from tailrace.policy.parameters import ParameterError, Value, read_assignments

set_option = click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="[POLICY:]KEY=VALUE",
    help="A parameter of the policy (tailrace get policies -o json lists them); may be repeated. "
    "Without POLICY: of all that have it.",
)


def parameters_of(
    assignments: Iterable[str], policies: Sequence[str]
) -> dict[str, tuple[tuple[str, Value], ...]]:
    """What each policy is given, checked. Raises UsageProblem."""
    try:
        given = _by_policy(read_assignments(assignments), policies)
        setups = {policy: setup_for(policy).with_parameters(given[policy]) for policy in policies}
    except (ParameterError, UnknownSetupError) as error:
        raise UsageProblem(f"--set: {error}") from error
    return {policy: tuple(setup.given.items()) for policy, setup in setups.items()}


def _by_policy(assigned: dict[str, str], policies: Sequence[str]) -> dict[str, dict[str, Value]]:
    """Raises ParameterError, UnknownSetupError."""
    given: dict[str, dict[str, Value]] = {policy: {} for policy in policies}
    known = {policy: {p.name for p in setup_for(policy).parameters()} for policy in policies}
    # What is said of one policy goes before what is said of all.
    for key, value in sorted(assigned.items(), key=lambda entry: ":" in entry[0]):
        policy, colon, name = key.rpartition(":")
        if colon and policy not in given:
            raise ParameterError(f"{key}: {policy!r} is not one of {', '.join(policies)}")
        takers = [policy] if colon else [p for p in policies if name in known[p]] or list(policies)
        for taker in takers:
            given[taker][name] = value
    return given
