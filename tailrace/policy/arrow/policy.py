"""Arrow's policy: SLO-aware request and instance scheduling (sections 5.3 and 5.5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import nsmallest
from typing import Final

from tailrace.actions import Action, Place, Placement, Refuse, SetPool
from tailrace.cluster import Arrival, ClusterView, InstanceView, Phase, Pool, RequestView
from tailrace.perf.steps import StepModel, max_running_tokens
from tailrace.perf.ttft import TtftPredictor
from tailrace.policy.arrow.attainment import AttainmentModel
from tailrace.policy.arrow.kv_wait import KvWait
from tailrace.policy.arrow.load import (
    LoadModel,
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
from tailrace.policy.candidates import CACHE_AWARE, Ledger, held_there
from tailrace.policy.deployment import Fact
from tailrace.policy.parameters import Parameter
from tailrace.policy.pulling import PULLS, pulling
from tailrace.profiles import Profile, load_profile

# The paper's model (section 7.1) on the GPU nearest to its H800 that there is a profile of.
PROFILE: Final = "llama-3.1-8b-h100"
# Most requests that a tick finds a decode instance for; it takes a few milliseconds for a thousand instances.
_HANDOVERS: Final = 64

# Values of the parameter `room`.
QUEUE: Final = "queue"
FILTER: Final = "filter"
# Values of the parameter `flips`.
PAPER: Final = "paper"
ATTAINMENT: Final = "attainment"

PREFILL_SHARE: Final = Parameter(
    "prefill_share",
    float,
    0.5,
    "share of the instances without a pool that are initially assigned to the prefill pool",
    source="Arrow, section 7.3 (4P+4D)",
    minimum=0.0,
    maximum=1.0,
)
TICK_INTERVAL: Final = Parameter(
    "tick_interval_s",
    float,
    0.5,
    "period of the monitor's rules",
    unit="s",
    source="ours, of Arrow's section 5.5",
    minimum=0.01,
)


class Arrow(Policy):
    """Alg. 1 at arrival, Alg. 2 when prefill is done, the monitor's rules on tick.

    What the paper leaves open is settled by the parameters:

    - `ttft_slo_s`, `tpot_slo_s`: the thresholds of Alg. 1 and 2 are the SLOs themselves. Defaults: Azure
      Conversation's (table 1), the largest of the four traces.
    - `profile`: what TTFT prediction and Max Running Tokens are fitted to, where nothing was measured of an
      instance and it reports neither.
    - `profiled_context_tokens`: request length at which Max Running Tokens is computed. It only
      weighs the cost of a request against that of its tokens; 1,024 is near the traces' mean context.
    - `low_load_share`: "load of decode instances is low" (Alg. 1) if the remaining ones could carry all
      running tokens within this share of Max Running Tokens each, and their mean token interval is within
      the TPOT SLO. "Busy" (idle-prefill rule) is to be above that share without the flip, so that the two
      rules cannot undo each other's flips. One half: a flip may double what the others carry.
    - `prefill_share`: how instances in no pool are divided at first. The paper starts its static baselines
      at 4P+4D; the same here.
    - `room`: by the letter a request is sent to the instance that Alg. 2 chooses and waits there for KV.
    - `tick_interval_s`: the monitor's period. Half a second: several token intervals, and yet
      shorter than the shortest queue that breaks a TTFT SLO of seconds.
    """

    needs = (Fact.TTFT_SLO, Fact.TPOT_SLO, Fact.PROFILE)
    parameters = (
        Parameter(
            "profiled_context_tokens",
            int,
            1024,
            "request length at which Max Running Tokens is computed",
            unit="tokens",
            source="ours, of Arrow's section 5.3",
            minimum=1,
        ),
        Parameter(
            "low_load_share",
            float,
            0.5,
            "decode load is low if the other instances could carry it within this share of Max Running "
            "Tokens",
            source="ours, of Arrow's Algorithm 1 (overload guard)",
            minimum=0.0,
        ),
        PREFILL_SHARE,
        TICK_INTERVAL,
        Parameter(
            "room",
            str,
            QUEUE,
            "queue: a request queues for KV at the decode instance that Algorithm 2 chooses; filter: "
            "choose only instances with room",
            source="Arrow, Algorithm 2 and section 5.4; filter: ours",
            choices=(QUEUE, FILTER),
        ),
        Parameter(
            "kv_wait",
            bool,
            False,
            "whether a prompt's predicted TTFT includes the wait for KV on the prefill instance",
            source="false: Arrow, section 5.3; true: ours",
        ),
        Parameter(
            "flips",
            str,
            PAPER,
            "paper: flip by Algorithms 1 and 2 and the monitor's rules; attainment: flip by the number of "
            "requests predicted to meet their SLOs, in prefill and decode together",
            source="paper: Arrow, sections 5.3 and 5.5; attainment: ours",
            choices=(PAPER, ATTAINMENT),
        ),
        Parameter(
            "flip_gain",
            float,
            0.05,
            "minimum share of requests that a flip must bring within their SLOs, with flips=attainment",
            minimum=0.0,
            maximum=1.0,
        ),
        CACHE_AWARE,
        PULLS,
    )
    batch_order = "decode_first"
    prefill_share: float
    summary = "Arrow: SLO-aware dispatch over elastic prefill and decode pools"

    def __init__(
        self,
        ttft_slo_s: float = 2.0,
        tpot_slo_s: float = 0.15,
        profile: Profile | None = None,
        profiled_context_tokens: int = 1024,
        low_load_share: float = 0.5,
        prefill_share: float = 0.5,
        tick_interval_s: float = 0.5,
        room: str = QUEUE,
        kv_wait: bool = False,
        flips: str = PAPER,
        flip_gain: float = 0.05,
        cache_aware: bool = False,
        pulls: bool = False,
    ) -> None:
        profile = profile if profile is not None else load_profile(PROFILE)
        self.ttft_slo_s = ttft_slo_s
        self.tpot_slo_s = tpot_slo_s
        self.low_load_share = low_load_share
        self.room = room
        self.kv_wait = kv_wait
        self.flips = flips
        self.cache_aware = cache_aware
        self.nominal = StepModel.of_profile(profile)
        self.pull = pulling(profile, pulls)
        self.prefill_share = prefill_share
        self.tick_interval_s = tick_interval_s
        self.loads = LoadModel(
            TtftPredictor.of_profile(profile),
            max_running_tokens(profile, tpot_slo_s, profiled_context_tokens),
        )
        self.attainment = AttainmentModel(self.loads, ttft_slo_s, tpot_slo_s, flip_gain, kv_wait)

    # ---- Alg. 1

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """SLO-aware prefill scheduling (Alg. 1), and whether the prefix is fetched.

        An instance in no pool counts as a prefill instance. A request that comes back after a loss is
        prefilled anew, output included.
        """
        return self.pull(view, arrival, self._dispatch(view, arrival, now))

    def _dispatch(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        pools = Pools.of(view, arrival.excluded)
        tokens, prefill_s = arrival.prompt_tokens + arrival.output_tokens, self.loads.prefill_s
        delay_s = self._delay_model(pools, tokens)
        if self.cache_aware and arrival.cached:
            delay_s = self._less_what_is_found(delay_s, arrival)
        delay_1, t_1 = _least_delay(pools.prefill + pools.unpooled, delay_s)
        if t_1 is not None and delay_1 + prefill_s(t_1, tokens) <= self.ttft_slo_s:
            return Place(t_1.instance_id)
        delay_2, t_2 = _least_delay(pools.decode_to_prefill, delay_s)
        if t_2 is not None and delay_2 + prefill_s(t_2, tokens) <= self.ttft_slo_s:
            return Place(t_2.instance_id)
        # With nobody able to prefill there is no choice: the overload guard does not apply.
        nobody = t_1 is None and t_2 is None
        move = try_move_decode_to_prefill(pools)
        if move is not None and (nobody or self._may_flip_to_prefill(pools, move, arrival, now)):
            return Place(move.instance_id, (move,))
        # "return t_1", and what is left where pools are empty, which the paper excludes: any instance can
        # do any work.
        last = t_1 or t_2 or _least_delay(tuple(pools.members()), delay_s)[1]
        return Place(last.instance_id) if last is not None else Refuse("no active instance")

    def _may_flip_to_prefill(self, pools: Pools, move: SetPool, arrival: Arrival, now: float) -> bool:
        """The overload guard, or what takes its place."""
        if self.flips == PAPER:
            return self._decode_load_is_low(pools, move)
        demand = self.attainment.demand(pools, now, arrival)
        return self.attainment.pays(pools, pools.after(move), demand) > 0.0

    # ---- Alg. 2

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """SLO-aware decode scheduling (Alg. 2); () leaves the request where it was prefilled."""
        return self._schedule_decode(
            Pools.of(view), request, _ledger(view), may_flip=lambda pools: self._flip_to_decode(pools, now)
        )

    def _schedule_decode(
        self,
        pools: Pools,
        request: RequestView,
        ledger: Ledger,
        may_flip: Callable[[Pools], SetPool | None],
    ) -> list[Action]:
        """As the paper has it, a target need not have room for the KV: the request waits in the target's FCFS
        queue (section 5.4), and decodes where it is until then.

        With `room` "filter" only targets with room count. When nobody has any, the request stays, and the
        tick asks again.
        """
        source_id = request.instance_id
        source = next((i for i in pools.members() if i.instance_id == source_id), None)
        if source is None or source.pool not in (Pool.PREFILL, Pool.DECODE_TO_PREFILL):
            return []
        if not ledger.may_send(source, request):
            return []
        eligible = ledger.may_receive if self.room == FILTER else ledger.may_queue
        t_1 = _least_tokens([i for i in pools.decode if eligible(i, request)], ledger)
        t_2 = _least_tokens([i for i in pools.prefill_to_decode if eligible(i, request)], ledger)
        for target in (t_1, t_2):
            if target is not None and self._takes_more(target, ledger):
                return [ledger.reserve(request, target, "prefill done")]
        move = may_flip(pools)
        if move is not None:
            if move.instance_id == source_id:
                return [move]
            t_3 = next(i for i in pools.members() if i.instance_id == move.instance_id)
            if eligible(t_3, request):
                return [move, ledger.reserve(request, t_3, "prefill done")]
            # The flip helps those that come after; this one takes what there is.
            return [move, *_to_lesser(t_1, t_2, request, ledger)]
        return _to_lesser(t_1, t_2, request, ledger)

    def _flip_to_decode(self, pools: Pools, now: float) -> SetPool | None:
        move = try_move_prefill_to_decode(pools, self.loads)
        if move is None or self.flips == PAPER:
            return move
        gain = self.attainment.pays(pools, pools.after(move), self.attainment.demand(pools, now))
        return move if gain > 0.0 else None

    def _takes_more(self, instance: InstanceView, ledger: Ledger) -> bool:
        tokens = running_tokens(instance) + ledger.reserved_tokens(instance)
        return tokens <= self.loads.most_tokens(instance) and instance.token_interval_s <= self.tpot_slo_s

    # ---- section 5.5

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        """Pool upkeep, at most one flip, then requests that still wait for a decode instance."""
        pools = Pools.of(view)
        moves = [*assign(pools, self.prefill_share), *settle(pools)]
        for move in moves:
            pools = pools.after(move)
        flip = repair(pools, self.loads)
        if flip is None:
            flip = self._monitored_flip(pools) if self.flips == PAPER else self._best_flip(pools, now)
        if flip is not None:
            pools = pools.after(flip)
            moves.append(flip)
        return [*moves, *self._waiting_to_decode(view, pools)]

    def _monitored_flip(self, pools: Pools) -> SetPool | None:
        """Cases 2 and 3 of "from prefill to decode" in section 5.5."""
        decoders = pools.decode + pools.prefill_to_decode
        if not decoders:
            return None
        if _decode_interval_s(pools) > self.tpot_slo_s:
            return try_move_prefill_to_decode(pools, self.loads)
        if self._share_carried(decoders, decoders) > self.low_load_share:
            return try_move_idle_to_decode(pools)
        return None

    def _best_flip(self, pools: Pools, now: float) -> SetPool | None:
        """The flip either way that brings most requests within their SLOs, if it brings enough."""
        moves = (try_move_decode_to_prefill(pools), try_move_prefill_to_decode(pools, self.loads))
        demand = self.attainment.demand(pools, now)
        gains = [
            (self.attainment.pays(pools, pools.after(move), demand), move)
            for move in moves
            if move is not None
        ]
        gain, move = max(gains, key=lambda found: found[0], default=(0.0, None))
        return move if gain > 0.0 else None

    def _waiting_to_decode(self, view: ClusterView, pools: Pools) -> list[Action]:
        """Requests that decode on a prefill instance because nobody had room, oldest first (section 5.4).

        D->P instances keep theirs: they were meant to end there.
        """
        waiting = [
            request
            for instance in pools.prefill
            if instance.running > 0
            for request in instance.requests
            if request.phase is not Phase.PREFILL and not request.migrating
        ]
        if not waiting:
            return []
        ledger = _ledger(view)
        oldest = nsmallest(_HANDOVERS, waiting, key=lambda request: (request.arrival_s, request.request_id))
        actions: list[Action] = []
        for request in oldest:
            actions += self._schedule_decode(pools, request, ledger, may_flip=lambda _: None)
        return actions

    # ---- load

    def _delay_model(self, pools: Pools, tokens: int) -> Callable[[InstanceView], float]:
        """Predicted seconds until the prefill of a prompt of that length would start."""
        delay_s = self.loads.prefill_delay_s
        if not self.kv_wait:
            return delay_s
        wait = KvWait(pools, self.tpot_slo_s)
        return lambda instance: max(delay_s(instance), wait.wait_s(instance, tokens))

    def _less_what_is_found(
        self, delay_s: Callable[[InstanceView], float], arrival: Arrival
    ) -> Callable[[InstanceView], float]:
        """As if the prefill of what the instance's prefix cache holds were saved before it starts."""
        found_s, nominal = self.loads.found_s, self.nominal
        return lambda i: delay_s(i) - found_s(i, held_there(arrival, i, nominal))

    def _decode_load_is_low(self, pools: Pools, move: SetPool) -> bool:
        """The overload guard: would the decode instances do without the one that is to be flipped?"""
        decoders = pools.decode + pools.prefill_to_decode
        others = [i for i in decoders if i.instance_id != move.instance_id]
        if not others or _decode_interval_s(pools) > self.tpot_slo_s:
            return False
        return self._share_carried(decoders, others) <= self.low_load_share

    def _share_carried(self, decoders: Sequence[InstanceView], by: Sequence[InstanceView]) -> float:
        """Running tokens of decode instances over what `by` may run."""
        most = sum(map(self.loads.most_tokens, by))
        return sum(map(running_tokens, decoders)) / most if most > 0 else float("inf")


def _least_delay(
    instances: Sequence[InstanceView], delay_s: Callable[[InstanceView], float]
) -> tuple[float, InstanceView | None]:
    least, found = float("inf"), None
    # Instances come in id order, so that the first of equals is the one with the least id; among
    # equals the one with fewer requests, which leaves idle prefill instances to share a burst.
    for instance in instances:
        delay = delay_s(instance)
        if found is None or (delay, instance.load) < (least, found.load):
            least, found = delay, instance
    return least, found


def _decode_interval_s(pools: Pools) -> float:
    """The decode instances' mean token interval; 0: nothing runs.

    P->D instances count only where no other runs anything: the prompts that they still compute lengthen their
    steps, and each further flip would make it more of them.
    """
    return mean_token_interval_s(pools.decode) or mean_token_interval_s(pools.prefill_to_decode)


def _ledger(view: ClusterView) -> Ledger:
    # The migration service queues what is over its limits: Arrow's FCFS migration queue (section 5.4).
    return Ledger(view.instances, transfers_in=None, transfers_out=None)


def _least_tokens(instances: Sequence[InstanceView], ledger: Ledger) -> InstanceView | None:
    """The instance of Alg. 2 with the least running tokens."""
    return min(
        instances,
        key=lambda i: (running_tokens(i) + ledger.reserved_tokens(i), i.instance_id),
        default=None,
    )


def _to_lesser(
    t_1: InstanceView | None, t_2: InstanceView | None, request: RequestView, ledger: Ledger
) -> list[Action]:
    """The last lines of Alg. 2."""
    if t_1 is None and t_2 is None:
        return []
    if t_2 is None or (t_1 is not None and running_tokens(t_1) <= running_tokens(t_2)):
        assert t_1 is not None
        return [ledger.reserve(request, t_1, "prefill done")]
    return [ledger.reserve(request, t_2, "prefill done")]
