"""Find batch orders (intra-instance policies) by name.

A user's package adds one with the entry point group `tailrace.batch_orders`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from tailrace.intra.base import ENGINE_ORDER, IntraPolicy
from tailrace.intra.earliest_due import EarliestDue
from tailrace.intra.orders import DecodeFirst, Fcfs, QuantumRoundRobin
from tailrace.intra.pascal import PascalQueue
from tailrace.plugins import PluginError, describe_error, load_plugin, plugins, wrong_declaration
from tailrace.policy.deployment import Deployment, Fact
from tailrace.policy.parameters import NO_PARAMETERS, Parameter, ParameterError, Value, parse_parameters
from tailrace.slo import Slo

GROUP: Final = "tailrace.batch_orders"

INTRA_POLICIES: Final[Mapping[str, type[IntraPolicy]]] = MappingProxyType(
    {
        "fcfs": Fcfs,
        "round_robin": QuantumRoundRobin,
        "pascal": PascalQueue,
        "decode_first": DecodeFirst,
        "earliest_due": EarliestDue,
    }
)


class UnknownIntraError(ValueError):
    """No batch order of that name is installed, or it cannot be loaded; the message says why."""


def intra_names() -> list[str]:
    """Return every name that `make_intra` accepts, sorted."""
    return sorted({ENGINE_ORDER, *INTRA_POLICIES, *plugins(GROUP)})


def make_intra(
    name: str, parameters: Mapping[str, Value] = NO_PARAMETERS, slo: Slo | None = None
) -> IntraPolicy | None:
    """Create the order of that name; return None for the engine's own.

    Parameters that are omitted have their defaults. Raise UnknownIntraError or ParameterError.
    """
    values = parse_parameters(f"order {name!r}", intra_parameters(name), parameters)
    if name == ENGINE_ORDER:
        return None
    kind, facts = _order_class(name), intra_facts(name, slo or Slo())
    try:
        return kind(**values, **facts)
    # The package may be third-party, and raise anything, SystemExit included.
    except BaseException as error:
        if isinstance(error, ValueError):
            # Each value is valid, but not in combination with the others.
            raise ParameterError(f"order {name!r}: {error}") from error
        raise UnknownIntraError(f"order {name!r} cannot be created: {describe_error(error)}") from error


def intra_facts(name: str, slo: Slo) -> dict[str, object]:
    """Return the deployment's facts that the order of that name needs. Raise UnknownIntraError."""
    return Deployment(slo).facts(intra_needs(name))


def intra_needs(name: str) -> tuple[Fact, ...]:
    """Return which facts about the deployment the order of that name plans with. Raise UnknownIntraError."""
    return () if name == ENGINE_ORDER else _order_class(name).needs


def intra_parameters(name: str) -> tuple[Parameter, ...]:
    """Return the parameters of the order of that name. Raise UnknownIntraError."""
    return () if name == ENGINE_ORDER else _order_class(name).parameters


def _order_class(name: str) -> type[IntraPolicy]:
    if name in INTRA_POLICIES:
        return INTRA_POLICIES[name]
    point = plugins(GROUP).get(name)
    if point is None:
        raise UnknownIntraError(f"unknown order {name!r}; known: {', '.join(intra_names())}")
    try:
        order = load_plugin(point)
    except PluginError as error:
        raise UnknownIntraError(f"order {name!r} {error}") from error
    if not (isinstance(order, type) and issubclass(order, IntraPolicy)):
        raise UnknownIntraError(f"order {name!r} ({point.value}) is not a tailrace.intra.base.IntraPolicy")
    if wrong := wrong_declaration(order, {"parameters": Parameter, "needs": Fact}):
        raise UnknownIntraError(f"order {name!r} ({point.value}): {wrong}")
    return order
