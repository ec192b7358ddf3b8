"""Choose the order in which a worker's engine serves its requests: a fixed one, or that of the fleet's
policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from tailrace.intra.base import ENGINE_ORDER
from tailrace.intra.registry import UnknownIntraError, intra_facts, intra_parameters
from tailrace.policy.parameters import NO_PARAMETERS, ParameterError, Value
from tailrace.policy.registry import UnknownPolicyError, UnusablePolicyError, choose
from tailrace.records import PolicyRecord
from tailrace.slo import Slo

log = logging.getLogger(__name__)

# Instead of a name: the fleet's policy determines the order, also when it is switched.
BY_POLICY: Final = "policy"

# An order's name and its parameters.
Order: TypeAlias = tuple[str, Mapping[str, Value]]


class IntraSwitch:
    """Set the engine's order, and set it again with each change of the order or of the SLOs behind it."""

    def __init__(
        self,
        intra: str,
        policy: Callable[[], PolicyRecord | None],
        slo: Callable[[], Slo],
        set_intra: Callable[[str, Mapping[str, Value], Slo], None],
    ) -> None:
        """`intra`: an order, or BY_POLICY. `policy()` returns the fleet's current policy, `slo()` the
        deployment's SLOs."""
        self._intra = intra
        self._policy = policy
        self._slo = slo
        self._set_intra = set_intra
        # With the facts that it depends on.
        self._present: tuple[Order, Mapping[str, object]] | None = None
        self._unavailable: PolicyRecord | None = None

    def update(self) -> None:
        """Apply a change of order or SLOs. Parameters that this worker cannot use change nothing.

        Raise UnknownIntraError.
        """
        order, slo = self._wanted(), self._slo()
        name, parameters = order
        requested = order, intra_facts(name, slo)
        if requested == self._present:
            return
        # Set first, so that a change that fails is tried only once.
        self._present = requested
        try:
            self._set_intra(name, parameters, slo)
        except ParameterError as error:
            log.error("cannot change the batch order: %s", error)
            return
        log.info("batch order: %r %s", name, dict(parameters))

    def _wanted(self) -> Order:
        """Return the order to serve in; the engine's own for a policy that is not installed here: then only
        the scheduler's part of it is in effect."""
        if self._intra != BY_POLICY:
            return self._intra, NO_PARAMETERS
        record = self._policy()
        try:
            return order_of_policy(record)
        except (UnknownPolicyError, UnusablePolicyError, UnknownIntraError, ParameterError) as error:
            # Log once, not at every change in etcd.
            if record != self._unavailable:
                log.error("using the engine's own batch order, not that of the policy: %s", error)
            self._unavailable = record
            return ENGINE_ORDER, NO_PARAMETERS


def order_of_policy(record: PolicyRecord | None) -> Order:
    """Return the order that belongs to a policy (None: no policy is set), with its share of the policy's
    parameters.

    Raise UnknownPolicyError, UnusablePolicyError, UnknownIntraError or ParameterError.
    """
    if record is None:
        return ENGINE_ORDER, NO_PARAMETERS
    choice = choose(record.name)
    accepted = {parameter.name for parameter in intra_parameters(choice.order)}
    values = {**choice.parameters, **record.parameters}
    return choice.order, {key: value for key, value in values.items() if key in accepted}
