"""The policy `tailrace`: its decisions at the decision points (docs/policy-tailrace.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tailrace.actions import Action, Place, Placement
from tailrace.cluster import Arrival, ClusterView
from tailrace.intra.earliest_due import LATE, TPOT_LIMIT, limits_tpot
from tailrace.perf.steps import StepModel
from tailrace.policy.base import Policy
from tailrace.policy.candidates import NO_INSTANCE
from tailrace.policy.columns import PerInstances
from tailrace.policy.deployment import Fact
from tailrace.policy.parameters import Value, parameter
from tailrace.policy.tailrace.copies import COPY_AHEAD, PERIOD_S, Copies
from tailrace.policy.tailrace.costs import Costs, Offers
from tailrace.policy.tailrace.pulls import with_pull
from tailrace.policy.tailrace.rebalance import rebalance
from tailrace.profiles import Profile
from tailrace.slo import DEFAULT_TPOT_S, DEFAULT_TTFT_S


class Tailrace(Policy):
    """Place, move and pull where a request costs all requests the least, in predicted seconds.

    - `profile`: step times of instances that have not been measured; None: nominal ones (`perf.steps`).
    - `tpot_slo_s`, `ttft_slo_s`: weight the delay of requests that answer and of those that reason.
    - `margin`: minimum saving of a migration, as a multiple of its transfer time. Two: once for the transfer,
      once more because the saving is a prediction while the transfer time is certain.
    - `pulls`, `pull_margin`: see `pulls.py`; `copy_ahead`: `copies.py`.
    - `tick_interval_s`: one second, as ARES (Algorithm 1, line 3).
    """

    needs = (Fact.PROFILE, Fact.TPOT_SLO, Fact.TTFT_SLO)
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
    late_s: float = LATE
    tpot_limit: float = TPOT_LIMIT
    tick_interval_s: float = parameter(
        1.0, "period of rebalancing", unit="s", source="ARES, Algorithm 1, line 3", minimum=0.01
    )
    batch_order = "earliest_due"
    summary = "Tailrace's own: placement, moves and pulls under one cost, in predicted seconds"

    def __init__(
        self,
        profile: Profile | None = None,
        *,
        tpot_slo_s: float = DEFAULT_TPOT_S,
        ttft_slo_s: float = DEFAULT_TTFT_S,
        **parameters: Value,
    ) -> None:
        super().__init__(**parameters)
        limits = limits_tpot(self.tpot_limit, tpot_slo_s, self.late_s, ttft_slo_s)
        limit = self.tpot_limit if limits else math.inf
        steps = StepModel.of_profile(profile)
        self.costs = Costs(steps, tpot_slo_s, ttft_slo_s, limit, self.late_s)
        self.offers = PerInstances(lambda: Offers(self.costs))
        self.copies = Copies(self.costs, self.pull_margin) if self.copy_ahead else None
        self.prefixes_period_s = PERIOD_S if self.copy_ahead else None

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Place the arrival where it costs least; pull its prefix there if that pays."""
        offers = self.offers.of(view)
        offers.update(view, now)
        cached = offers.usable_tokens(arrival.cached)
        costs_s = offers.arrival_s(arrival, cached, now)
        if costs_s.min(initial=np.inf) == np.inf:
            return NO_INSTANCE
        cheapest, pull_from = int(costs_s.argmin()), ""
        if self.pulls and arrival.cached:
            cheapest, pull_from = with_pull(offers, arrival, cheapest, cached, now, self.pull_margin)
        return Place(offers.instances[cheapest].instance_id, pull_from=pull_from)

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        """Rebalance, and copy hot prefixes."""
        offers = self.offers.of(view)
        offers.update(view, now)
        prices_s = offers.prices_s()
        actions: list[Action] = [*rebalance(offers, view, prices_s, self.margin)]
        if self.copies is not None:
            actions += self.copies.plan(view, dict(zip(offers.at, prices_s.tolist(), strict=True)), actions)
        return actions
