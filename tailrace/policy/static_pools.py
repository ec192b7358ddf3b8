"""Static pools: prefill in one pool, decode in the other, never move an instance between them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from heapq import nsmallest
from typing import ClassVar, Final
from zlib import crc32

from tailrace.actions import Action, Migrate, Place, Placement, Refuse, SetPool
from tailrace.cluster import Arrival, ClusterView, InstanceView, Phase, Pool, RequestView
from tailrace.perf.ttft import TtftPredictor
from tailrace.policy.arrow.load import LoadModel, running_tokens
from tailrace.policy.arrow.policy import PREFILL_SHARE, PROFILE, TICK_INTERVAL
from tailrace.policy.arrow.pools import Pools, assign
from tailrace.policy.base import Policy
from tailrace.policy.candidates import Ledger
from tailrace.policy.deployment import Fact
from tailrace.policy.parameters import Value, parameter
from tailrace.profiles import Profile, load_profile

# As in `Arrow`.
_HANDOVERS: Final = 64
_SETTLED: Final[Mapping[Pool | None, Pool]] = {
    Pool.PREFILL_TO_DECODE: Pool.DECODE,
    Pool.DECODE_TO_PREFILL: Pool.PREFILL,
}


# Values of the parameter `dispatch`.
MINIMAL_LOAD: Final = "minimal_load"
ROUND_ROBIN: Final = "round_robin"


class StaticPools(Policy):
    """Static PD disaggregation: dispatch to the least loaded instance of a pool, or round robin; the
    baselines of Arrow's section 7.3.

    Load is defined as in Arrow ("only includes the minimum-load request scheduling strategy"): predicted
    prefill delay, and tokens of running requests. `profile`: source of the prediction for instances that
    report none. `prefill_share` divides the instances that are in no pool, once; half, as the paper's 4P+4D.
    If no decode instance accepts a request, the handover is retried on each tick, as in `Arrow`.

    Round robin uses the arrival's sequence number. There is none when prefill is done, and a policy is
    stateless, so a hash of the request id takes its place, which is just as independent of load.
    """

    needs: ClassVar[tuple[Fact, ...]] = (Fact.PROFILE,)
    dispatch: str = parameter(
        MINIMAL_LOAD,
        "within a pool: the least loaded instance, or round robin",
        source="Arrow, section 7.3",
        choices=(MINIMAL_LOAD, ROUND_ROBIN),
    )
    prefill_share: float = PREFILL_SHARE
    tick_interval_s: float = TICK_INTERVAL
    batch_order = "decode_first"
    summary = "prefill pool and decode pool of fixed membership, least loaded within each"

    def __init__(self, profile: Profile | None = None, **parameters: Value) -> None:
        super().__init__(**parameters)
        predictor = TtftPredictor.of_profile(profile if profile is not None else load_profile(PROFILE))
        # SLOs play no part: only its KV bounds a batch.
        self.loads = LoadModel(predictor, max_running_tokens=sys.maxsize)

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Return the prefill instance with the least prefill delay, or the next one in turn; without prefill
        instances, choose among all."""
        pools = Pools.of(view, arrival.excluded)
        candidates = pools.prefill + pools.unpooled or tuple(pools.members())
        if not candidates:
            return Refuse("no active instance")
        if self.dispatch == ROUND_ROBIN:
            return Place(candidates[arrival.seq % len(candidates)].instance_id)
        delay_s = self.loads.prefill_delay_s
        return Place(min(candidates, key=lambda i: (delay_s(i), i.load, i.instance_id)).instance_id)

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Hand over to the decode instance with the fewest running tokens, where the request waits for room
        (section 5.4)."""
        source = view.instances.get(request.instance_id)
        ledger = Ledger(view.instances, transfers_in=None, transfers_out=None)
        if source is None or source.pool is not Pool.PREFILL or not ledger.may_send(source, request):
            return ()
        decoders = [i for i in Pools.of(view).decode if ledger.may_queue(i, request)]
        target = self._decoder(decoders, request, ledger)
        return (ledger.reserve(request, target, "prefill done"),) if target is not None else ()

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        """Assign instances without a pool, then retry handovers of requests that decode on prefill
        instances."""
        pools = Pools.of(view)
        # Static pools have no transitional states, even if an instance still has other work to finish.
        moves = [
            SetPool(move.instance_id, _SETTLED.get(move.pool, move.pool))
            for move in assign(pools, self.prefill_share)
        ]
        for move in moves:
            pools = pools.after(move)
        return [*moves, *self._waiting_to_decode(view, pools)]

    def _waiting_to_decode(self, view: ClusterView, pools: Pools) -> list[Migrate]:
        ledger = Ledger(view.instances, transfers_in=None, transfers_out=None)
        waiting = [
            request
            for instance in pools.prefill
            if instance.running > 0
            for request in instance.requests
            if request.phase is not Phase.PREFILL and not request.migrating
        ]
        oldest = nsmallest(_HANDOVERS, waiting, key=lambda request: (request.arrival_s, request.request_id))
        moved: list[Migrate] = []
        for request in oldest:
            target = self._decoder([i for i in pools.decode if ledger.may_queue(i, request)], request, ledger)
            if target is not None:
                moved.append(ledger.reserve(request, target, "prefill done"))
        return moved

    def _decoder(
        self, decoders: Sequence[InstanceView], request: RequestView, ledger: Ledger
    ) -> InstanceView | None:
        if not decoders:
            return None
        if self.dispatch == ROUND_ROBIN:
            return decoders[crc32(request.request_id.encode()) % len(decoders)]
        return min(decoders, key=lambda i: (running_tokens(i) + ledger.reserved_tokens(i), i.instance_id))
