"""Intra-instance policies by name, and which one goes with a policy of the fleet.

Used by the worker (`--intra`, and when the fleet's policy is switched) and by whoever sets up a simulation.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from tailrace.intra.base import IntraPolicy
from tailrace.intra.decode_first import DecodeFirst
from tailrace.intra.earliest_due import EarliestDue
from tailrace.intra.fcfs import Fcfs
from tailrace.intra.pascal import PascalQueue
from tailrace.intra.round_robin import QuantumRoundRobin
from tailrace.policy.deployment import Deployment
from tailrace.policy.parameters import NO_PARAMETERS, Parameter, ParameterError, Value, parse_parameters
from tailrace.slo import Slo

# The engine's own order: no policy of ours. A simulation takes Fcfs for it, which is what vLLM's order is.
ENGINE_ORDER: Final = "vllm"

INTRA_POLICIES: Final[Mapping[str, type[IntraPolicy]]] = MappingProxyType(
    {
        "fcfs": Fcfs,
        "round_robin": QuantumRoundRobin,
        "pascal": PascalQueue,
        "decode_first": DecodeFirst,
        "earliest_due": EarliestDue,
    }
)

# Policies of the fleet that are published together with an order inside the instance. A paper's baselines
# have the order of the system that they are compared with, so that the dispatch alone differs.
_GOES_WITH: Final[Mapping[str, str]] = MappingProxyType(
    {
        "pascal": "pascal",
        "pascal_no_migration": "pascal",
        "pascal_non_adaptive": "pascal",
        "arrow": "decode_first",
        "minimal_load": "decode_first",
        "round_robin_pools": "decode_first",
        "static_pools": "decode_first",
        "tailrace": "earliest_due",
    }
)


class UnknownIntraError(ValueError):
    """No intra-instance policy of that name."""


def intra_names() -> list[str]:
    """Every name that `make_intra` takes, sorted."""
    return sorted([ENGINE_ORDER, *INTRA_POLICIES])


def make_intra(
    name: str, parameters: Mapping[str, Value] = NO_PARAMETERS, slo: Slo | None = None
) -> IntraPolicy | None:
    """The order of that name; None for the engine's own. Without `parameters` it has its defaults.

    Raises UnknownIntraError, ParameterError.
    """
    values = parse_parameters(f"order {name!r}", intra_parameters(name), parameters)
    if name == ENGINE_ORDER:
        return None
    try:
        return INTRA_POLICIES[name](**values, **intra_facts(name, slo or Slo()))
    except ValueError as error:
        # Each value is allowed, but not together with the others.
        raise ParameterError(f"order {name!r}: {error}") from error


def intra_facts(name: str, slo: Slo) -> dict[str, object]:
    """What the order of that name goes by of the deployment. Raises UnknownIntraError."""
    intra_parameters(name)
    return {} if name == ENGINE_ORDER else Deployment(slo).facts(INTRA_POLICIES[name].needs)


def intra_parameters(name: str) -> tuple[Parameter, ...]:
    """What the order of that name declares. Raises UnknownIntraError."""
    if name == ENGINE_ORDER:
        return ()
    found = INTRA_POLICIES.get(name)
    if found is None:
        raise UnknownIntraError(f"unknown order {name!r}; known: {', '.join(intra_names())}")
    return found.parameters


def intra_for_policy(policy: str) -> str:
    """Name of the order that goes with a fleet's policy; the engine's own for one that says nothing of it."""
    return _GOES_WITH.get(policy, ENGINE_ORDER)
