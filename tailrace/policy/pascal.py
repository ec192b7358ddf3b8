"""PASCAL's instance-level scheduler (section IV-B).

Algorithm 1 places an arriving request. When its reasoning ends, Algorithm 2 selects the instance that answers
it, and adaptive migration may override that selection if memory is short. The intra-instance scheduler is
`tailrace.intra.pascal`.

The parameter `migration` has the ablations of section V-D: "always" migrates to Algorithm 2's selection
whether or not it has sufficient GPU memory (non-adaptive); "never" answers on the instance that reasoned.

Choices that the paper leaves open:

- t_i, "whether all answering requests meet their SLOs": false if the pacer of any of them is `behind_tokens`
  or more behind. A stream at exactly the user's pace is up to one token behind just before each token, so one
  whole token is the smallest deficit that indicates a problem. A request without an answering token has no
  pace; if it is not on the device either, its pacer is empty and stays empty, and t_i is false.
- m_i includes prompts that were sent to an instance but have no KV yet, with weight `queued_weight`. With 0,
  as in the paper, all arrivals between two reports of the monitor go to one instance.
- "Sufficient GPU memory" for the answering phase, whose length is unknown: `growth_tokens` beyond what the
  request holds, by default one quantum, the time for which the instance's queue lets it run.
- Ties of Algorithm 2's argmin: stay, since a migration would gain nothing; then the smallest m_i. Choosing
  the lowest index instead would send everything to the first instance of an idle cluster.
- r_i and a_i exclude the request that is being decided on.
- If neither Algorithm 2's selection nor the current instance has room, the request moves into the selected
  instance's host memory if that has any, as in the paper, where m_i includes host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Generic, NamedTuple

import numpy as np

from tailrace.actions import Action, Migrate, Place, Placement, WhenFull
from tailrace.cluster import Arrival, ClusterView, InstanceState, InstanceView, PhaseLoad, RequestView
from tailrace.intra.base import QUANTUM, QUANTUM_TOKENS
from tailrace.perf.steps import Floats, Number, StepModel
from tailrace.policy.base import Policy
from tailrace.policy.candidates import (
    CACHE_AWARE,
    NO_INSTANCE,
    QUEUED_WEIGHT,
    fits_device,
    fits_host,
    footprint_tokens,
    held_tokens_on,
)
from tailrace.policy.columns import Columns, PerInstances, SeenInstances, smallest
from tailrace.policy.deployment import Fact
from tailrace.policy.parameters import Value, parameter
from tailrace.policy.pulling import PULLS, pulling
from tailrace.policy.requests import Mask, table_of
from tailrace.profiles import Profile

# Values of the parameter `migration`.
ADAPTIVE: Final = "adaptive"
ALWAYS: Final = "always"
NEVER: Final = "never"


class _Loads(NamedTuple, Generic[Number]):
    """What Algorithms 1 and 2 read of one instance, or, as arrays, of each instance."""

    # 1.0: may get new requests.
    active: Number
    # m_i, in tokens.
    footprint: Number
    # r_i and a_i.
    reasoning: Number
    fresh_answering: Number
    # Decides t_i.
    least_slack: Number


class Pascal(Policy):
    """Place by Algorithm 1, and migrate by Algorithm 2 when reasoning ends.

    The module describes the parameters.
    """

    needs = (Fact.PROFILE,)
    migration: str = parameter(
        ADAPTIVE,
        "when reasoning ends, migrate to Algorithm 2's choice: unless memory is short, always, or never",
        source="PASCAL, section IV-B; section V-D's always is non-adaptive, never no migration",
        choices=(ADAPTIVE, ALWAYS, NEVER),
    )
    behind_tokens: float = parameter(
        1.0,
        "how far an answering request may fall behind its user's pace before it fails its SLO (t_i)",
        unit="tokens",
        source="ours, of PASCAL's Algorithm 1, line 3",
        minimum=0.0,
    )
    pacer: bool = parameter(
        True,
        "whether front ends show answers no faster than users read (pace of the SLOs)",
        source="PASCAL, section V-A",
    )
    queued_weight: float = QUEUED_WEIGHT
    cache_aware: bool = CACHE_AWARE
    pulls: bool = PULLS
    quantum_tokens: int = QUANTUM
    growth_tokens: int = parameter(
        QUANTUM_TOKENS,
        "free KV, beyond what a request holds, that is sufficient for its answering phase",
        unit="tokens",
        source="ours, of PASCAL's section IV-B (adaptive migration): one quantum",
        minimum=0,
    )
    batch_order = "pascal"
    # "Spilling its KV cache to CPU memory" (section IV-B, on Algorithm 2).
    when_full = WhenFull.HOST
    summary = "PASCAL: reasoning to small KV, answering to few reasoning, migrating where memory allows"

    def __init__(self, *, profile: Profile | None = None, **parameters: Value) -> None:
        super().__init__(**parameters)
        if self.quantum_tokens < 1:
            raise ValueError(f"a quantum has at least one token, not {self.quantum_tokens}")
        self.nominal = StepModel.of_profile(profile)
        self.pull = pulling(profile, self.pulls)
        self._columns = PerInstances(lambda: Columns(self._read, len(_Loads._fields)))

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Select an instance by Algorithm 1: of those that meet their SLOs, the smallest KV footprint."""
        loads, seen = self._loads(view)
        usable = _usable(loads, seen, arrival.excluded)
        if not usable.any():
            return NO_INSTANCE
        eligible = usable & (loads.least_slack > -self.behind_tokens)  # line 3
        if not eligible.any():
            eligible = usable  # lines 4-6
        footprint = loads.footprint
        if self.cache_aware:
            footprint = self._less_cached(view, footprint, seen, arrival)
        chosen = seen.names[smallest(footprint, eligible)]  # line 7
        return self.pull(view, arrival, Place(chosen))

    def on_reasoning_ended(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Migrate to Algorithm 2's selection unless that is the current instance or memory rules it out."""
        source = view.instances.get(request.instance_id)
        if self.migration == NEVER or source is None or request.migrating:
            return ()
        target = self.select(view, source, request)
        if target is None or target.instance_id == source.instance_id or self.stays(source, target, request):
            return ()
        reason = "reasoning ended"
        return (Migrate(request.request_id, source.instance_id, target.instance_id, reason),)

    def select(self, view: ClusterView, source: InstanceView, request: RequestView) -> InstanceView | None:
        """Select an instance by Algorithm 2; return None without instances."""
        loads, seen = self._loads(view)
        here = seen.at[source.instance_id]
        reasoning, fresh, slack = (
            loads.reasoning.copy(),
            loads.fresh_answering.copy(),
            loads.least_slack.copy(),
        )
        others = self._load_without(source, request)
        reasoning[here], fresh[here] = others.reasoning, others.fresh_answering
        slack[here] = others.least_pacer_slack_tokens
        usable = loads.active != 0.0
        eligible = usable & (slack > -self.behind_tokens)  # line 3
        if not eligible.any():
            eligible, reasoning = usable, reasoning + fresh  # lines 4-9
            if not usable.any():
                return None
        tied = eligible & (reasoning == np.where(eligible, reasoning, np.inf).min())
        if tied[here]:
            return source
        return view.instances[seen.names[smallest(loads.footprint, tied)]]  # line 10

    def stays(self, source: InstanceView, target: InstanceView, request: RequestView) -> bool:
        """Return whether memory rules the migration out (section IV-B, figure 7).

        It does if the target has no room for the request in GPU or host memory; with adaptive migration also
        if the current instance has sufficient GPU memory and the target has not.
        """
        if self.migration == ADAPTIVE:
            if fits_device(target, request.context_tokens, self.growth_tokens):
                return False
            needed = max(0, request.context_tokens - request.kv_tokens) + self.growth_tokens
            if source.kv_free_tokens >= needed:
                return True
        return not fits_device(target, request.context_tokens) and not fits_host(
            target, request.context_tokens
        )

    def load_of(self, instance: InstanceView) -> PhaseLoad:
        """Return r_i, a_i and the pacer slack that decides t_i."""
        return table_of(instance.requests).phase_load(self.quantum_tokens)

    def _load_without(self, instance: InstanceView, request: RequestView) -> PhaseLoad:
        return table_of(instance.requests).phase_load(self.quantum_tokens, request.request_id)

    # ---- columns

    def _loads(self, view: ClusterView) -> tuple[_Loads[Floats], SeenInstances]:
        columns = self._columns.of(view)
        return _Loads(*columns.update(view)), columns.seen

    def _read(self, instance: InstanceView) -> _Loads[float]:
        load = self.load_of(instance)
        return _Loads(
            active=float(instance.state is InstanceState.ACTIVE),
            footprint=footprint_tokens(instance, self.queued_weight),
            reasoning=load.reasoning,
            fresh_answering=load.fresh_answering,
            least_slack=load.least_pacer_slack_tokens,
        )

    def _less_cached(
        self, view: ClusterView, footprint: Floats, seen: SeenInstances, arrival: Arrival
    ) -> Floats:
        """Return the footprints without the tokens of the arrival that each instance has cached."""
        less = footprint.copy()
        for name in arrival.cached:
            if (position := seen.at.get(name)) is not None:
                less[position] -= held_tokens_on(arrival, view.instances[name], self.nominal)
        return less


def _usable(loads: _Loads[Floats], seen: SeenInstances, excluded: Iterable[str]) -> Mask:
    """Return which instances may get the arrival."""
    usable: Mask = loads.active != 0.0
    for name in excluded:
        if (position := seen.at.get(name)) is not None:
            usable[position] = False
    return usable
