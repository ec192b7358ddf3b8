"""The order in which a worker's engine serves its requests: a named one, or that of the fleet's policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from tailrace.intra.base import ENGINE_ORDER
from tailrace.intra.registry import UnknownIntraError, intra_facts, intra_parameters
from tailrace.policy.parameters import NO_PARAMETERS, ParameterError, Value
from tailrace.policy.registry import UnknownPolicyError, UnusablePolicyError, variant
from tailrace.records import PolicyRecord
from tailrace.slo import Slo
from tailrace.store.membership import Membership

log = logging.getLogger(__name__)

# In place of a name: as the fleet's policy has it, also when that is switched.
BY_POLICY: Final = "policy"

# Engine.set_intra.
SetIntra: TypeAlias = Callable[[str, Mapping[str, Value], Slo], None]
# An order's name and its parameters.
Order: TypeAlias = tuple[str, Mapping[str, Value]]


class IntraSwitch:
    """Tells the engine of a change, once."""

    def __init__(self, order: Callable[[], Order], slo: Callable[[], Slo], set_intra: SetIntra) -> None:
        """`order`: the one that is wanted now. `slo`: the deployment's objectives now."""
        self._order = order
        self._slo = slo
        self._set_intra = set_intra
        # With the facts that it goes by.
        self._present: tuple[Order, Mapping[str, object]] | None = None

    def look(self) -> None:
        """Order or SLOs may have changed. Parameters that this worker cannot use change nothing.

        Raises UnknownIntraError.
        """
        order, slo = self._order(), self._slo()
        name, parameters = order
        wanted = order, intra_facts(name, slo)
        if wanted == self._present:
            return
        # Tried once, whatever comes of it.
        self._present = wanted
        try:
            self._set_intra(name, parameters, slo)
        except ParameterError as error:
            log.error("requests are not served in another order: %s", error)
            return
        log.info("requests are served in the order %r %s", name, dict(parameters))


def order_of_policy(record: PolicyRecord | None) -> Order:
    """The order that goes with the fleet's policy, None while none is set, and what it has of the policy's
    parameters. Raises UnknownPolicyError, UnusablePolicyError, UnknownIntraError."""
    if record is None:
        return ENGINE_ORDER, NO_PARAMETERS
    policy = variant(record.name)
    name = policy.policy.batch_order
    taken = {parameter.name for parameter in intra_parameters(name)}
    given = {**policy.parameters, **record.parameters}
    return name, {key: value for key, value in given.items() if key in taken}


class PolicyOrder:
    """The order that goes with the fleet's policy, whatever that is at the moment.

    Of a policy that the scheduler has and this worker has not, only the scheduler's half is followed.
    """

    def __init__(self, policy: Callable[[], PolicyRecord | None]) -> None:
        """`policy`: the fleet's, now."""
        self._policy = policy
        self._not_here: PolicyRecord | None = None

    def __call__(self) -> Order:
        """Return the order to serve in; the engine's own for a policy that is not installed here."""
        record = self._policy()
        try:
            return order_of_policy(record)
        except (UnknownPolicyError, UnusablePolicyError, UnknownIntraError) as error:
            # Logged once, not at every change of anything in etcd.
            if record != self._not_here:
                log.error("requests are served in the engine's own order, not that of the policy: %s", error)
            self._not_here = record
            return ENGINE_ORDER, NO_PARAMETERS


def order_by(intra: str, set_intra: SetIntra, membership: Membership) -> None:
    """Set the order, and keep it up with the deployment's SLOs, and with the fleet's policy if it is
    BY_POLICY. Raises UnknownIntraError."""
    fixed: Order = (intra, NO_PARAMETERS)
    order = PolicyOrder(lambda: membership.policy) if intra == BY_POLICY else lambda: fixed
    switch = IntraSwitch(order, lambda: membership.slo, set_intra)
    switch.look()
    membership.add_listener(switch.look)
