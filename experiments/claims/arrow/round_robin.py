"""Arrow's round robin (section 7.3)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from tailrace.cluster import InstanceView, RequestView
from tailrace.policy.candidates import Ledger
from tailrace.policy.parameters import Value
from tailrace.policy.static_pools import StaticPools
from tailrace.profiles import Profile


class RoundRobinPools(StaticPools):
    """Static pools whose decode instances take turns, as the prefill instances do.

    `static_pools dispatch=round_robin` hashes the request instead, since a policy keeps no state and nothing
    numbers handovers. This one counts them: one object serves one simulation.
    """

    def __init__(self, profile: Profile | None = None, **parameters: Value) -> None:
        super().__init__(profile, **parameters)
        self._turns = count()

    def _decoder(
        self, decoders: Sequence[InstanceView], request: RequestView, ledger: Ledger
    ) -> InstanceView | None:
        return decoders[next(self._turns) % len(decoders)] if decoders else None
