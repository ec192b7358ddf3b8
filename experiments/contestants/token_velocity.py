"""Pools by token velocity, the leading signal of TokenScale (arXiv 2512.03416)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from tailrace.actions import Action, Place, Placement, SetPool
from tailrace.cluster import Arrival, ClusterView, Pool
from tailrace.lengths import LengthStatistics
from tailrace.perf.steps import max_running_tokens
from tailrace.policy.arrow.load import running_tokens
from tailrace.policy.arrow.policy import PROFILE
from tailrace.policy.arrow.pools import Pools
from tailrace.policy.deployment import Fact
from tailrace.policy.parameters import Value, parameter
from tailrace.policy.static_pools import StaticPools
from tailrace.profiles import Profile, load_profile

# Context at which a decoder's Max Running Tokens is computed, as in `Arrow`.
_CONTEXT: Final = 1_024


class TokenVelocity(StaticPools):
    """Divide the fleet by the tokens that arrive per second over what an instance can process per second.

    The paper's: *token velocity*, the most tokens that a stage can process per second, compared with the
    tokens that arrive, tells a shortage before queues or utilization do. The number of prefillers is the rate
    of input tokens over their velocity, that of decoders the sum over kinds of requests of the rate of their
    tokens over the velocity at that kind. *Convertible decoders* also prefill, in what their TPOT SLO leaves
    of a step, while prefillers are short.

    Ours: the paper scales the number of instances, while here a fleet of fixed size is divided. All that do
    not prefill decode; if both sides need more than there is, in proportion to their needs. Velocities are
    those of the profile, of the prompts that arrived, and of decode batches that the TPOT SLO allows; the
    network's is left out, since KV links are not the bottleneck here. The rate is that of the last
    `window_s`. One instance is moved per tick, the least loaded one. Any decoder is convertible: it gets an
    arrival if no prefiller is predicted to meet the TTFT SLO, and the fewest prompt tokens wait there.
    """

    needs = (Fact.TTFT_SLO, Fact.TPOT_SLO, Fact.PROFILE)
    window_s: float = parameter(
        5.0, "period over which arriving tokens are counted", unit="s", minimum=0.1, source="ours"
    )
    summary = "pools divided by token velocity, after TokenScale"

    def __init__(
        self,
        ttft_slo_s: float = 2.0,
        tpot_slo_s: float = 0.15,
        profile: Profile | None = None,
        **parameters: Value,
    ) -> None:
        profile = profile if profile is not None else load_profile(PROFILE)
        super().__init__(profile, **parameters)
        self.lengths_period_s = self.window_s
        self.ttft_slo_s = ttft_slo_s
        self._profile = profile
        self._most_tokens = min(max_running_tokens(profile, tpot_slo_s, _CONTEXT), profile.kv_capacity_tokens)

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Return the prefill instance with the least delay; a decode instance if none meets the TTFT SLO."""
        placed = super().place(view, arrival, now)
        if not isinstance(placed, Place):
            return placed
        chosen = view.instances[placed.instance_id]
        tokens = arrival.prompt_tokens + arrival.output_tokens
        delay_s = self.loads.prefill_delay_s
        own_s = self.loads.prefill_s(chosen, tokens)
        decoders = Pools.of(view, arrival.excluded).decode
        if not decoders or delay_s(chosen) + own_s <= self.ttft_slo_s:
            return placed
        convertible = min(
            decoders, key=lambda i: (i.prefill_backlog_tokens, running_tokens(i), i.instance_id)
        )
        return Place(convertible.instance_id) if delay_s(convertible) < delay_s(chosen) else placed

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        """Assign instances without a pool, move one to the pool that is short, then retry handovers."""
        actions = list(super().on_tick(view, now))
        pools = Pools.of(view)
        if view.lengths is None or pools.unpooled:
            return actions
        move = self._move(pools, self.prefillers(view.lengths, len(pools.prefill) + len(pools.decode)))
        return [*([] if move is None else [move]), *actions]

    def prefillers(self, lengths: LengthStatistics, instances: int) -> int:
        """Return how many of the instances prefill; at least one, and one less than all at most."""
        prefill, decode = self.needed(lengths)
        if prefill + decode > instances:
            prefill *= instances / (prefill + decode)
        return max(1, min(instances - 1, math.ceil(prefill - 1e-9)))

    def needed(self, lengths: LengthStatistics) -> tuple[float, float]:
        """Return the instances that the tokens of the period need to prefill, and to decode."""
        prompts, counts = lengths.arrived()
        total = float(counts.sum())
        if not lengths.seconds or not total:
            return 0.0, 0.0
        # The prefill velocity at the mean length, weighted by tokens, is tokens over the seconds they take.
        prefill = self._profile.prefill
        per_prompt_ms = prefill.ms_per_token * prompts + prefill.ms_per_token_squared * prompts**2
        seconds = float(counts @ (prefill.base_ms + per_prompt_ms)) / 1e3
        inputs, outputs, weights = lengths.finished()
        if not len(outputs):
            return seconds / lengths.seconds, 0.0
        # A request takes its share of a decoder's tokens for as many steps as it has output tokens.
        contexts = inputs + outputs / 2.0
        batch = self._most_tokens / max(1.0, float(weights @ contexts / weights.sum()))
        step_s = self._profile.step_ms(0.0, max(1, round(batch)), self._most_tokens) / 1e3
        each_s = float(weights @ (outputs * contexts)) / float(weights.sum()) * step_s / self._most_tokens
        return seconds / lengths.seconds, total / lengths.seconds * each_s

    def _move(self, pools: Pools, prefillers: int) -> SetPool | None:
        """Return the move of the least loaded instance to the pool that is short."""
        if len(pools.prefill) < prefillers and len(pools.decode) > 1:
            chosen = min(pools.decode, key=lambda i: (running_tokens(i), i.instance_id))
            return SetPool(chosen.instance_id, Pool.PREFILL)
        if len(pools.prefill) > prefillers and len(pools.prefill) > 1:
            delay_s = self.loads.prefill_delay_s
            chosen = min(pools.prefill, key=lambda i: (delay_s(i), i.load, i.instance_id))
            return SetPool(chosen.instance_id, Pool.DECODE)
        return None
