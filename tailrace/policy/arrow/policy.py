"""Arrow's policy: SLO-aware request scheduling (section 5.3) and instance scheduling (section 5.5).

`pools` has the elastic pools with Algorithms 3 and 4, `load` the load metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush, heapreplace, nsmallest
from math import inf
from operator import itemgetter
from typing import Final

import numpy as np

from tailrace.actions import Action, Place, Placement, Refuse, SetPool
from tailrace.cluster import Arrival, ClusterView, InstanceState, InstanceView, Pool, RequestView
from tailrace.perf.steps import StepModel, max_running_tokens
from tailrace.perf.ttft import TtftPredictor
from tailrace.policy.arrow.attainment import AttainmentModel, KvWait
from tailrace.policy.arrow.load import (
    DecodeTargets,
    LeastDelay,
    LoadModel,
    PrefillTargets,
    has_decodes_left,
    mean_token_interval_s,
    running_tokens,
)
from tailrace.policy.arrow.pools import (
    Pools,
    assign,
    repair,
    settle,
    try_move_decode_to_prefill,
    try_move_idle_to_decode,
    try_move_prefill_to_decode,
)
from tailrace.policy.base import Policy
from tailrace.policy.candidates import CACHE_AWARE, Ledger, held_tokens_on
from tailrace.policy.columns import has_many
from tailrace.policy.deployment import Fact
from tailrace.policy.parameters import Value, parameter
from tailrace.policy.pulling import PULLS, pulling
from tailrace.policy.requests import RequestTable, table_of
from tailrace.profiles import Profile, load_profile

# The paper's model (section 7.1) on the built-in profile's GPU that is nearest to its H800.
PROFILE: Final = "llama-3.1-8b-h100"
# Maximum number of handovers per tick, which take a few milliseconds with a thousand instances.
_HANDOVERS: Final = 64

# Pools whose requests decode elsewhere (Algorithm 2).
_HANDS_OVER: Final = (Pool.PREFILL, Pool.DECODE_TO_PREFILL)

# Values of the parameter `room`.
QUEUE: Final = "queue"
FILTER: Final = "filter"
# Values of the parameter `busy`.
LOADED: Final = "loaded"
DECODING: Final = "decoding"
# Values of the parameter `flips`.
PAPER: Final = "paper"
ATTAINMENT: Final = "attainment"

PREFILL_SHARE: Final = parameter(
    0.5,
    "share of the instances without a pool that are initially assigned to the prefill pool",
    source="Arrow, section 7.3 (4P+4D)",
    minimum=0.0,
    maximum=1.0,
)
TICK_INTERVAL: Final = parameter(
    0.5, "period of the monitor's rules", unit="s", source="ours, of Arrow's section 5.5", minimum=0.01
)


class Arrow(Policy):
    """Algorithm 1 at arrival, Algorithm 2 when prefill is done, the monitor's rules on tick.

    Choices that the paper leaves open:

    - `ttft_slo_s`, `tpot_slo_s`: the thresholds of Alg. 1 and 2 are the SLOs themselves. Defaults: Azure
      Conversation's (table 1), the largest of the four traces.
    - `profile`: source of TTFT prediction and Max Running Tokens for instances that have not been measured
      and report neither.
    - `profiled_context_tokens`: request length at which Max Running Tokens is computed. It only weighs the
      cost of a request against that of its tokens; 1,024 is near the traces' mean context.
    - `low_load_share`: "load of decode instances is low" (Alg. 1) if the remaining ones could run all tokens
      within this share of Max Running Tokens each, and their mean token interval is within the TPOT SLO.
      "Busy" (idle-prefill rule) means above that share without the flip, so that the two rules cannot undo
      each other's flips. One half: a flip may double the load of the others.
    - `busy`: read literally, decode instances are busy if they decode anything; then every idle prefill
      instance is added to them.
    - `prefill_share`: the initial division of instances without a pool. As the paper's static baselines:
      4P+4D.
    - `room`: in the paper, a request is sent to the instance that Alg. 2 chooses and waits there for KV.
    - `tick_interval_s`: the monitor's period. Half a second is several token intervals, but less than the
      shortest queue that violates a TTFT SLO of seconds.
    """

    needs = (Fact.TTFT_SLO, Fact.TPOT_SLO, Fact.PROFILE)
    profiled_context_tokens: int = parameter(
        1024,
        "request length at which Max Running Tokens is computed",
        unit="tokens",
        source="ours, of Arrow's section 5.3",
        minimum=1,
    )
    low_load_share: float = parameter(
        0.5,
        "decode load is low if the other instances could carry it within this share of Max Running Tokens",
        source="ours, of Arrow's Algorithm 1 (overload guard)",
        minimum=0.0,
    )
    prefill_share: float = PREFILL_SHARE
    tick_interval_s: float = TICK_INTERVAL
    room: str = parameter(
        QUEUE,
        "queue: a request queues for KV at the decode instance that Algorithm 2 chooses; filter: "
        "choose only instances with room",
        source="Arrow, Algorithm 2 and section 5.4; filter: ours",
        choices=(QUEUE, FILTER),
    )
    busy: str = parameter(
        LOADED,
        "when idle prefill instances are added to decode instances: these are above low_load_share, or "
        "decode anything",
        source="Arrow, section 5.5, does not say what busy is; decoding: literally; loaded: ours",
        choices=(LOADED, DECODING),
    )
    kv_wait: bool = parameter(
        False,
        "whether a prompt's predicted TTFT includes the wait for KV on the prefill instance",
        source="false: Arrow, section 5.3; true: ours",
    )
    flips: str = parameter(
        PAPER,
        "paper: flip by Algorithms 1 and 2 and the monitor's rules; attainment: flip by the number of "
        "requests predicted to meet their SLOs, in prefill and decode together",
        source="paper: Arrow, sections 5.3 and 5.5; attainment: ours",
        choices=(PAPER, ATTAINMENT),
    )
    flip_gain: float = parameter(
        0.05,
        "minimum share of requests that a flip must bring within their SLOs, with flips=attainment",
        minimum=0.0,
        maximum=1.0,
    )
    cache_aware: bool = CACHE_AWARE
    pulls: bool = PULLS
    batch_order = "decode_first"
    summary = "Arrow: SLO-aware dispatch over elastic prefill and decode pools"

    def __init__(
        self,
        ttft_slo_s: float = 2.0,
        tpot_slo_s: float = 0.15,
        profile: Profile | None = None,
        **parameters: Value,
    ) -> None:
        super().__init__(**parameters)
        profile = profile if profile is not None else load_profile(PROFILE)
        self.ttft_slo_s = ttft_slo_s
        self.tpot_slo_s = tpot_slo_s
        self.nominal = StepModel.of_profile(profile)
        self.pull = pulling(profile, self.pulls)
        context_tokens = self.profiled_context_tokens
        limit = max_running_tokens(profile, tpot_slo_s, context_tokens)
        self.loads = LoadModel(TtftPredictor.of_profile(profile), limit, tpot_slo_s, context_tokens)
        self.prefill_targets = PrefillTargets(self.loads)
        self.decode_targets = DecodeTargets(needs_room=self.room == FILTER)
        self.attainment = AttainmentModel(self.loads, ttft_slo_s, tpot_slo_s, self.flip_gain, self.kv_wait)

    # ---- Alg. 1

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Schedule the prefill by Algorithm 1; add a pull of the prefix if that pays.

        An instance in no pool counts as a prefill instance. A request that resumes after its instance was
        lost prefills its output as well.
        """
        return self.pull(view, arrival, self._dispatch(view, arrival, now))

    def _dispatch(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        tokens = arrival.prompt_tokens + arrival.output_tokens
        first, second = self._least_delays(view, arrival, tokens)
        for delay, target in (first, second):
            if target is not None and delay + self.loads.prefill_s(target, tokens) <= self.ttft_slo_s:
                return Place(target.instance_id)
        pools = Pools.of(view, arrival.excluded)
        t_1, t_2 = first[1], second[1]
        # Without any prefill instance, a flip is necessary: the overload guard does not apply.
        no_prefill = t_1 is None and t_2 is None
        move = try_move_decode_to_prefill(pools)
        if move is not None and (no_prefill or self._may_flip_to_prefill(pools, move, arrival, now)):
            return Place(move.instance_id, (move,))
        # "return t_1". The paper excludes empty pools; then any instance will do, as all can do any work.
        fallback = t_1 or t_2
        if fallback is None:
            delay_s = self._delay_model(pools, tokens, arrival)
            fallback = _least_delay(tuple(pools.members()), delay_s)[1]
        return Place(fallback.instance_id) if fallback is not None else Refuse("no active instance")

    def _least_delays(
        self, view: ClusterView, arrival: Arrival, tokens: int
    ) -> tuple[LeastDelay, LeastDelay]:
        """Return t_1 and t_2 of Algorithm 1 with their delays."""
        looks_further = self.kv_wait or (self.cache_aware and arrival.cached)
        if has_many(view) and not looks_further:
            return self.prefill_targets.least_delays(view, arrival.excluded)
        pools = Pools.of(view, arrival.excluded)
        delay_s = self._delay_model(pools, tokens, arrival)
        return (
            _least_delay(pools.prefill + pools.unpooled, delay_s),
            _least_delay(pools.decode_to_prefill, delay_s),
        )

    def _may_flip_to_prefill(self, pools: Pools, move: SetPool, arrival: Arrival, now: float) -> bool:
        """Apply Algorithm 1's overload guard, or its replacement with flips=attainment."""
        if self.flips == PAPER:
            return self._decode_load_is_low(pools, move)
        demand = self.attainment.demand(pools, now, arrival)
        return self.attainment.flip_gain_requests(pools, pools.after(move), demand) > 0.0

    # ---- Alg. 2

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Schedule the decode by Algorithm 2; () leaves the request where it was prefilled."""
        if has_many(view):
            source = view.instances.get(request.instance_id)
            if source is None or source.state is not InstanceState.ACTIVE or source.pool not in _HANDS_OVER:
                return ()
            ledger = _ledger(view)
            if not ledger.may_send(source, request):
                return ()
            for found in self.decode_targets.least_tokens(view, request):
                if found is not None and self._within_slo(found, ledger):
                    return (ledger.reserve(request, found, "prefill done"),)
        among = self._decode_candidates(Pools.of(view), _ledger(view))
        return self._schedule_decode(among, request, lambda pools: self._flip_to_decode(pools, now))

    def _decode_candidates(self, pools: Pools, ledger: Ledger) -> DecodeCandidates:
        eligible = ledger.may_receive if self.room == FILTER else ledger.may_queue
        return DecodeCandidates(pools, ledger, eligible)

    def _schedule_decode(
        self,
        among: DecodeCandidates,
        request: RequestView,
        may_flip: Callable[[Pools], SetPool | None],
    ) -> list[Action]:
        """Select a decode instance by Algorithm 2.

        In the paper a target need not have room for the KV: the request waits in the target's FCFS queue
        (section 5.4), and decodes where it is until then. With `room` "filter" only targets with room are
        eligible; if there is none, the request stays, and a tick tries again.
        """
        pools, ledger, source_id = among.pools, among.ledger, request.instance_id
        source = next((i for i in pools.members() if i.instance_id == source_id), None)
        if source is None or source.pool not in _HANDS_OVER:
            return []
        if not ledger.may_send(source, request):
            return []
        t_1, t_2 = among.decode.least(request), among.prefill_to_decode.least(request)
        for target in (t_1, t_2):
            if target is not None and self._within_slo(target, ledger):
                return [ledger.reserve(request, target, "prefill done")]
        move = may_flip(pools)
        if move is not None:
            if move.instance_id == source_id:
                return [move]
            t_3 = next(i for i in pools.members() if i.instance_id == move.instance_id)
            if among.eligible(t_3, request):
                return [move, ledger.reserve(request, t_3, "prefill done")]
            # The flipped instance cannot take this request, but it will help later ones.
            return [move, *_to_less_loaded(t_1, t_2, request, ledger)]
        return _to_less_loaded(t_1, t_2, request, ledger)

    def _flip_to_decode(self, pools: Pools, now: float) -> SetPool | None:
        move = try_move_prefill_to_decode(pools, self.loads)
        if move is None or self.flips == PAPER:
            return move
        demand = self.attainment.demand(pools, now)
        gain = self.attainment.flip_gain_requests(pools, pools.after(move), demand)
        return move if gain > 0.0 else None

    def _within_slo(self, instance: InstanceView, ledger: Ledger) -> bool:
        tokens = running_tokens(instance) + ledger.reserved_tokens(instance)
        return tokens <= self.loads.max_tokens(instance) and instance.token_interval_s <= self.tpot_slo_s

    # ---- section 5.5

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        """Maintain the pools, flip at most one instance, then retry handovers to decode instances."""
        pools = Pools.of(view)
        moves = [*assign(pools, self.prefill_share), *settle(pools)]
        pools = pools.after(*moves)
        flip = repair(pools, self.loads)
        if flip is None:
            flip = self._monitored_flip(pools) if self.flips == PAPER else self._best_flip(pools, now)
        if flip is not None:
            pools = pools.after(flip)
            moves.append(flip)
        return [*moves, *self._waiting_to_decode(view, pools)]

    def _monitored_flip(self, pools: Pools) -> SetPool | None:
        """Apply cases 2 and 3 of "from prefill to decode" (section 5.5)."""
        decoders = pools.decode + pools.prefill_to_decode
        if not decoders:
            return None
        if _decode_interval_s(pools) > self.tpot_slo_s:
            return try_move_prefill_to_decode(pools, self.loads)
        return try_move_idle_to_decode(pools) if self._busy(decoders) else None

    def _busy(self, decoders: Sequence[InstanceView]) -> bool:
        """Return whether the decode instances are busy (section 5.5, case 3)."""
        if self.busy == DECODING:
            return any(map(has_decodes_left, decoders))
        return self._load_share(decoders, decoders) > self.low_load_share

    def _best_flip(self, pools: Pools, now: float) -> SetPool | None:
        """Return the flip, in either direction, that brings the most requests within their SLOs, if that is
        enough."""
        moves = (try_move_decode_to_prefill(pools), try_move_prefill_to_decode(pools, self.loads))
        demand = self.attainment.demand(pools, now)
        gains = [
            (self.attainment.flip_gain_requests(pools, pools.after(move), demand), move)
            for move in moves
            if move is not None
        ]
        gain, move = max(gains, key=lambda candidate: candidate[0], default=(0.0, None))
        return move if gain > 0.0 else None

    def _waiting_to_decode(self, view: ClusterView, pools: Pools) -> list[Action]:
        """Hand over requests that decode on a prefill instance because no decode instance had room, oldest
        first (section 5.4).

        Requests on D->P instances stay: such an instance finishes its decodes.
        """
        tables = [table_of(instance.requests) for instance in pools.prefill if instance.running > 0]
        arrivals_s = [requests.arrival_s[requests.decoding] for requests in tables]
        waiting_s = np.concatenate(arrivals_s) if arrivals_s else np.empty(0)
        if not len(waiting_s):
            return []
        # Of thousands that wait, only the oldest are sorted; those of the last one's age by their ids.
        last = min(_HANDOVERS, len(waiting_s)) - 1
        oldest_s = float(np.partition(waiting_s, last)[last])
        oldest: list[tuple[float, str, RequestTable, int]] = []
        for requests in tables:
            rows = np.flatnonzero(requests.decoding & (requests.arrival_s <= oldest_s)).tolist()
            if rows:
                ids, arrived_s = requests.ids, requests.arrival_s
                oldest += [(float(arrived_s[row]), ids[row], requests, row) for row in rows]
        oldest = nsmallest(_HANDOVERS, oldest, key=itemgetter(0, 1))
        among = self._decode_candidates(pools, _ledger(view))
        actions: list[Action] = []
        for _, _, requests, row in oldest:
            actions += self._schedule_decode(among, requests.view(row), may_flip=lambda _: None)
        return actions

    # ---- load

    def _delay_model(self, pools: Pools, tokens: int, arrival: Arrival) -> Callable[[InstanceView], float]:
        """Return a function from an instance to the predicted seconds until the prefill of a prompt of
        `tokens` starts there, less what its prefix cache saves if that counts."""
        delay_s: Callable[[InstanceView], float] = self.loads.prefill_delay_s
        if self.kv_wait:
            delay_s = self._with_kv_wait(pools, tokens)
        if self.cache_aware and arrival.cached:
            return self._net_of_cache(delay_s, arrival)
        return delay_s

    def _with_kv_wait(self, pools: Pools, tokens: int) -> Callable[[InstanceView], float]:
        delay_s, wait = self.loads.prefill_delay_s, KvWait(pools, self.tpot_slo_s)
        return lambda instance: max(delay_s(instance), wait.wait_s(instance, tokens))

    def _net_of_cache(
        self, delay_s: Callable[[InstanceView], float], arrival: Arrival
    ) -> Callable[[InstanceView], float]:
        """Subtract from the delay the prefill time that the instance's prefix cache saves."""
        saved_s, nominal = self.loads.saved_s, self.nominal
        return lambda i: delay_s(i) - saved_s(i, held_tokens_on(arrival, i, nominal))

    def _decode_load_is_low(self, pools: Pools, move: SetPool) -> bool:
        """Return whether the other decode instances could take the load of the one to be flipped (Alg. 1,
        overload guard)."""
        decoders = pools.decode + pools.prefill_to_decode
        others = [i for i in decoders if i.instance_id != move.instance_id]
        if not others or _decode_interval_s(pools) > self.tpot_slo_s:
            return False
        return self._load_share(decoders, others) <= self.low_load_share

    def _load_share(self, decoders: Sequence[InstanceView], by: Sequence[InstanceView]) -> float:
        """Return the running tokens of `decoders` over the Max Running Tokens of `by`."""
        limit = sum(map(self.loads.max_tokens, by))
        return sum(map(running_tokens, decoders)) / limit if limit > 0 else float("inf")


def _least_delay(instances: Sequence[InstanceView], delay_s: Callable[[InstanceView], float]) -> LeastDelay:
    least, best = float("inf"), None
    # Of equal delays choose the fewest requests, which spreads a burst over idle prefill instances, then the
    # first in id order.
    for instance in instances:
        delay = delay_s(instance)
        if best is None or (delay, instance.load) < (least, best.load):
            least, best = delay, instance
    return least, best


def _decode_interval_s(pools: Pools) -> float:
    """Return the decode instances' mean token interval; 0 if they run nothing.

    P->D instances count only if no other one runs anything: their remaining prompts lengthen their steps, and
    counting those would cause further flips, which add more P->D instances.
    """
    return mean_token_interval_s(pools.decode) or mean_token_interval_s(pools.prefill_to_decode)


def _ledger(view: ClusterView) -> Ledger:
    # No limits: the migration service queues migrations beyond its own, as Arrow's FCFS queue (section 5.4).
    return Ledger(view.instances, transfers_in=None, transfers_out=None)


Eligible = Callable[[InstanceView, RequestView], bool]


class DecodeCandidates:
    """The instances among which Algorithm 2 chooses during one decision."""

    def __init__(self, pools: Pools, ledger: Ledger, eligible: Eligible) -> None:
        """`eligible`: whether an instance may get a request, given what the ledger has reserved."""
        self.pools = pools
        self.ledger = ledger
        self.eligible = eligible
        self.decode = _ByTokens(pools.decode, ledger, eligible)
        self.prefill_to_decode = _ByTokens(pools.prefill_to_decode, ledger, eligible)


class _ByTokens:
    """The instances of one pool in a heap: on a tick, many requests ask for the least loaded one in turn."""

    def __init__(self, instances: Sequence[InstanceView], ledger: Ledger, eligible: Eligible) -> None:
        self._ledger = ledger
        self._eligible = eligible
        self._heap = [(self._tokens(i), i.instance_id, i) for i in instances]
        heapify(self._heap)
        # No instance can take a request with this much context and this much KV.
        self._refused: tuple[float, float] = inf, inf

    def least(self, request: RequestView) -> InstanceView | None:
        """Return the eligible instance with the least running tokens, then the first by id (Alg. 2)."""
        size = request.context_tokens, max(request.kv_tokens, request.context_tokens)
        if size[0] >= self._refused[0] and size[1] >= self._refused[1]:
            # Within a decision instances only fill up.
            return None
        heap, found = self._heap, None
        ineligible: list[tuple[int, str, InstanceView]] = []
        while heap and found is None:
            tokens, name, instance = heap[0]
            if (now := self._tokens(instance)) != tokens:
                # Something was reserved there since.
                heapreplace(heap, (now, name, instance))
            elif self._eligible(instance, request):
                found = instance
            else:
                ineligible.append(heappop(heap))
        for entry in ineligible:
            heappush(heap, entry)
        if found is None:
            self._refused = size
        return found

    def _tokens(self, instance: InstanceView) -> int:
        return running_tokens(instance) + self._ledger.reserved_tokens(instance)


def _to_less_loaded(
    t_1: InstanceView | None, t_2: InstanceView | None, request: RequestView, ledger: Ledger
) -> list[Action]:
    """Hand over to the less loaded of the two (the last lines of Alg. 2)."""
    if t_1 is None and t_2 is None:
        return []
    if t_2 is None or (t_1 is not None and running_tokens(t_1) <= running_tokens(t_2)):
        assert t_1 is not None
        return [ledger.reserve(request, t_1, "prefill done")]
    return [ledger.reserve(request, t_2, "prefill done")]
