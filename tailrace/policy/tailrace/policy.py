"""The policy `tailrace`: its decisions at the five decision points (docs/policy-tailrace.md)."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.actions import Action, Place, Placement, SetPool
from tailrace.cluster import Arrival, ClusterView, InstanceView, RequestView
from tailrace.handover import TRANSFERS
from tailrace.perf.length_penalty import FittedLengthPenalty
from tailrace.perf.steps import NOMINAL, StepModel
from tailrace.policy.arrow.policy import FILTER, Arrow
from tailrace.policy.base import Policy
from tailrace.policy.candidates import NO_INSTANCE, Ledger, candidates
from tailrace.policy.columns import PerInstances
from tailrace.policy.deployment import Fact
from tailrace.policy.parameters import Value, parameter
from tailrace.policy.requests import movable
from tailrace.policy.tailrace.copies import COPY_AHEAD, PERIOD_S, Copies
from tailrace.policy.tailrace.costs import Costs
from tailrace.policy.tailrace.moves import MovePlanner, late_handovers, rebalance
from tailrace.policy.tailrace.offers import OfferPlanner
from tailrace.policy.tailrace.pulls import Pulls
from tailrace.policy.tailrace.targets import (
    Decoders,
    Targets,
    decoders,
    groups,
    next_stage,
    pooled,
    prefillers,
    within_stage,
)
from tailrace.profiles import Profile, load_profile


class Tailrace(Policy):
    """PASCAL, ARES, Arrow and CascadeInfer under one cost model, in predicted seconds.

    - `profile`: step times of instances that have not been measured; None: nominal ones (`perf.steps`).
    - `penalty`: the cost of unequal lengths in a batch, if known.
    - `margin`: minimum saving of a migration, as a multiple of its transfer time. Two: once for the transfer,
      once more because the saving is a prediction while the transfer time is certain.
    - `pulls`, `pull_margin`: see `pulls.py`; `copy_ahead`: `copies.py`.
    - `ttft_slo_s`, `tpot_slo_s`: thresholds of Arrow's pool flips, if pools are used; the TPOT SLO also
      weights the decode steps of answering requests.
    - `tick_interval_s`: one second, as ARES (Algorithm 1, line 3).
    """

    needs = (Fact.PROFILE, Fact.PENALTY, Fact.TTFT_SLO, Fact.TPOT_SLO)
    margin: float = parameter(
        2.0, "minimum saving of a migration, as a multiple of its transfer time", minimum=0.0
    )
    pulls: bool = parameter(
        True,
        "whether a prefix that another instance holds is pulled if that takes less time than computing it",
    )
    pull_margin: float = parameter(
        1.0,
        "minimum saving of a pull or a copy ahead, as a multiple of its transfer time; 0: pull every "
        "prefix that another instance holds",
        minimum=0.0,
    )
    copy_ahead: bool = COPY_AHEAD
    tick_interval_s: float = parameter(
        1.0,
        "period of rebalancing and of the pools' rules",
        unit="s",
        source="ARES, Algorithm 1, line 3",
        minimum=0.01,
    )
    batch_order = "earliest_due"
    summary = "Tailrace's own: the four papers' mechanisms under one cost, in predicted seconds"

    def __init__(
        self,
        profile: Profile | None = None,
        penalty: FittedLengthPenalty | None = None,
        *,
        ttft_slo_s: float = 2.0,
        tpot_slo_s: float = 0.15,
        **parameters: Value,
    ) -> None:
        super().__init__(**parameters)
        profile = profile if profile is not None else load_profile(NOMINAL)
        steps = StepModel.of_profile(profile)
        self.costs = Costs(steps, penalty, tpot_slo_s=tpot_slo_s)
        self.offers = PerInstances(lambda: OfferPlanner(self.costs))
        self.decoders = Decoders(self.costs)
        self.puller = Pulls(self.costs, self.pull_margin) if self.pulls else None
        self.copies = Copies(self.costs, self.pull_margin) if self.copy_ahead else None
        self.prefixes_period_s = PERIOD_S if self.copy_ahead else None
        self.ttft_slo_s = ttft_slo_s
        self.arrow = Arrow(ttft_slo_s, tpot_slo_s, profile, tick_interval_s=self.tick_interval_s, room=FILTER)

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Place the arrival where it costs least, among the prefill instances of the stage for its length."""
        costs, tokens = self.costs, arrival.prompt_tokens + arrival.output_tokens
        offers = self.offers.of(view)
        offers.update(costs, view)
        instances = offers.instances
        usable: Sequence[InstanceView] = instances
        among: Sequence[InstanceView] | None = None
        # In the common case all instances are candidates, and need not be checked one by one.
        if arrival.excluded or not offers.all_active:
            among = usable = candidates(view, arrival)
        if not usable:
            return NO_INSTANCE
        if view.stages:
            among = usable = within_stage(view, usable, tokens)
        if offers.pooled:
            among = prefillers(usable)
        chosen, pull_from = offers.cheapest(among, tokens, now, arrival.cached), ""
        if self.puller is not None and arrival.cached:
            chosen, pull_from = self.puller.place(offers, among, arrival, chosen, now)
        if offers.pooled:
            cached_tokens = costs.held_tokens(chosen, arrival.held_on(chosen.instance_id))
            cached = max(cached_tokens, arrival.reported_tokens(pull_from))
            if costs.first_token_s(chosen, tokens, cached) > self.ttft_slo_s:
                flipped = self.arrow.place(view, arrival, now)
                if isinstance(flipped, Place) and flipped.also:
                    return flipped
        return Place(chosen.instance_id, pull_from=pull_from)

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """With pools, hand over to the decode instance where the request costs least; without, decode in
        place."""
        source = view.instances.get(request.instance_id)
        if source is None or source.pool is None:
            return ()
        arrow = self.arrow.on_prefill_done(view, request, now)
        flips = [action for action in arrow if isinstance(action, SetPool)]
        flipped = {flip.instance_id for flip in flips}
        if not arrow or source.instance_id in flipped:
            return flips
        mover, active = self._mover(view), view.placeable()
        targets = [*decoders(active), *(i for i in active if i.instance_id in flipped)]
        best = mover.cheapest(request, source, Targets.of(self.costs, targets))
        return flips if best is None else [*flips, mover.reserve(request, best.instance, "prefill done")]

    def on_reasoning_ended(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Move the request to the instance where its answer costs least, if that pays off."""
        source = view.instances.get(request.instance_id)
        if source is None:
            return ()
        if view.stages:
            within = within_stage(view, decoders(view.placeable()), request.context_tokens)
            targets = Targets.of(self.costs, within)
        else:
            targets = self.decoders.targets(view)
        mover = self._mover(view)
        move = mover.best(request, source, targets)
        return () if move is None else (mover.reserve(request, move.target, "reasoning ended"),)

    def on_length_boundary(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Hand over to the next stage if that pays.

        If the cost of unequal lengths is unknown, the stage alone decides.
        """
        source = view.instances.get(request.instance_id)
        if source is None or not movable(request):
            return ()
        allowed = {i.instance_id for i in decoders(view.placeable())}
        later = next_stage(view, request.instance_id, request.context_tokens)
        targets = Targets.of(self.costs, [i for i in later if i.instance_id in allowed])
        mover = self._mover(view)
        if self.costs.penalty is None:
            best = mover.cheapest(request, source, targets)
            target = None if best is None else best.instance
        else:
            move = mover.best(request, source, targets)
            target = None if move is None else move.target
        return () if target is None else (mover.reserve(request, target, "length boundary"),)

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        """Move instances between pools, retry handovers, rebalance, and copy hot prefixes."""
        actions: list[Action] = []
        mover = self._mover(view)
        if pooled(view):
            actions += [a for a in self.arrow.on_tick(view, now) if isinstance(a, SetPool)]
            actions += late_handovers(mover, view, self.decoders)
        offers = self.offers.of(view)
        offers.update(self.costs, view)
        price = offers.prices_s()
        for group in groups(view, decoders(view.placeable())):
            actions += rebalance(mover, self.costs, price, group)
        if self.copies is not None:
            actions += self.copies.plan(view, price, actions)
        return actions

    def _mover(self, view: ClusterView) -> MovePlanner:
        return MovePlanner(self.costs, Ledger(view.instances, TRANSFERS, TRANSFERS), self.margin)
