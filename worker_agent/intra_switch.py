"""The order in which a worker's engine serves its requests: a named one, or that of the fleet's policy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from tailrace.intra.registry import intra_for_policy
from tailrace.store.membership import Membership

log = logging.getLogger(__name__)

# In place of a name: as the fleet's policy has it, also when that is switched.
BY_POLICY: Final = "policy"


class IntraSwitch:
    """Tells the engine of a change, once."""

    def __init__(self, policy: Callable[[], str | None], set_intra: Callable[[str], None]) -> None:
        """`policy`: the fleet's, None while none is set."""
        self._policy = policy
        self._set_intra = set_intra
        self._name: str | None = None

    def look(self) -> None:
        """The fleet's policy may have changed."""
        policy = self._policy()
        name = intra_for_policy(policy or "")
        if name != self._name:
            self._name = name
            self._set_intra(name)
            log.info("requests are served in the order %r, which goes with policy %r", name, policy)


def order_by(intra: str, set_intra: Callable[[str], None], membership: Membership) -> None:
    """Set the order, and keep it up with the fleet's policy if it is BY_POLICY. Raises UnknownIntraError."""
    if intra != BY_POLICY:
        set_intra(intra)
        return
    switch = IntraSwitch(lambda: membership.policy, set_intra)
    membership.add_listener(switch.look)
    switch.look()
