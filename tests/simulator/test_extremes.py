"""Every policy decides with each of its numbers at the ends of what it may be."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from simulator.scenario import Scenario, SimulatedFleet, simulated
from simulator.workloads.resolve import WorkloadOptions
from tailrace.policy.parameters import Parameter, ParameterError, Value
from tailrace.policy.registry import declared_parameters, load, names, policy_class
from tailrace.slo import Slo

FLEET = SimulatedFleet("llama-3.1-8b-h100", 2)
OPTIONS = WorkloadOptions(seed=1, rate_per_s=6.0, count=10)


def ends(parameter: Parameter) -> Iterator[Value]:
    """Yield the least and the largest value that is accepted."""
    largest = float(2**53) if parameter.type is int else 1e12
    accepted = []
    for candidate in (parameter.minimum, parameter.maximum, -largest, largest, sys.float_info.max):
        try:
            accepted.append(parameter.parse(parameter.default if candidate is None else candidate))
        except ValueError:
            continue
    yield from {min(accepted), max(accepted)}


@pytest.mark.parametrize("name", names())
def test_every_number_may_be_at_either_end(name: str) -> None:
    kind = policy_class(name)
    for parameter in declared_parameters(kind, kind.batch_order):
        for value in ends(parameter) if parameter.type in (int, float) else ():
            try:
                load(name, parameters={parameter.name: value})
            except ParameterError:
                # It contradicts another one's default.
                continue
            policy = f"{name} {parameter.name}={value!r}"
            result = simulated(Scenario(policy, "sharegpt_turns", OPTIONS, FLEET, Slo(2.0, 0.1)))
            assert len(result.requests) == OPTIONS.count, policy
