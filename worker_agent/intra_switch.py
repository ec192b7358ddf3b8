"""The order in which a worker's engine serves its requests: a named one, or that of the fleet's policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from tailrace.intra.registry import intra_for_policy, intra_parameters
from tailrace.policy.parameters import ParameterError, Value
from tailrace.records import PolicyRecord
from tailrace.store.membership import Membership

log = logging.getLogger(__name__)

# In place of a name: as the fleet's policy has it, also when that is switched.
BY_POLICY: Final = "policy"

# Engine.set_intra.
SetIntra: TypeAlias = Callable[[str, Mapping[str, Value]], None]


class IntraSwitch:
    """Tells the engine of a change, once."""

    def __init__(self, policy: Callable[[], PolicyRecord | None], set_intra: SetIntra) -> None:
        """`policy`: the fleet's, None while none is set."""
        self._policy = policy
        self._set_intra = set_intra
        self._present: tuple[str, Mapping[str, Value]] | None = None

    def look(self) -> None:
        """The fleet's policy may have changed. Parameters that this worker cannot use change nothing."""
        record = self._policy() or PolicyRecord(name="")
        name = intra_for_policy(record.name)
        taken = {parameter.name for parameter in intra_parameters(name)}
        parameters = {key: value for key, value in record.parameters.items() if key in taken}
        if (name, parameters) == self._present:
            return
        # Tried once, whatever comes of it.
        self._present = name, parameters
        try:
            self._set_intra(name, parameters)
        except ParameterError as error:
            log.error("the order of policy %r cannot be followed: %s", record.name, error)
            return
        log.info("requests are served in the order %r %s of policy %r", name, parameters, record.name)


def order_by(intra: str, set_intra: SetIntra, membership: Membership) -> None:
    """Set the order, and keep it up with the fleet's policy if it is BY_POLICY. Raises UnknownIntraError."""
    if intra != BY_POLICY:
        set_intra(intra, {})
        return
    switch = IntraSwitch(lambda: membership.policy, set_intra)
    membership.add_listener(switch.look)
    switch.look()
