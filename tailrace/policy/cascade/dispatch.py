"""Select the instance of a stage that gets an arrival (CascadeInfer, section 4.4), and return what waits
in the wrong one."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final

from tailrace.actions import ReturnPrompts
from tailrace.cluster import ClusterView, InstanceState, InstanceView, RequestState, RequestView, Stage
from tailrace.perf.steps import Floats
from tailrace.policy.cascade.layout import StageMembers, active_in, earliest_stage
from tailrace.policy.cascade.room import demand_tokens
from tailrace.policy.columns import Columns, PerInstances
from tailrace.policy.requests import table_of

# More requests than an instance has. Shares of demand are below 2**32, so that a rank is exact.
_REQUESTS_MAX: Final = 1 << 20


def demand_share(instance: InstanceView, held_tokens: int = 0) -> int:
    """Return the demand, less what the instance has cached of the arrival, in thousandths of capacity.

    They are whole ones, so that a few tokens do not outweigh the number of requests.
    """
    return (demand_tokens(instance) - held_tokens) * 1_000 // (instance.kv_capacity_tokens or 1)


def has_slot(instance: InstanceView) -> bool:
    """Return whether the instance's batch has a slot for one more request, as far as it says."""
    return not instance.max_num_seqs or instance.load < instance.max_num_seqs


class LeastDemand:
    """Select by the demand of all instances, by column. Of equal shares of demand the fewest requests decide,
    then the id."""

    def __init__(self) -> None:
        self._ranks = PerInstances(_Ranks)

    def of_stage(self, view: ClusterView, stage: Stage, excluded: Collection[str]) -> InstanceView | None:
        """Return an active instance of the stage; None: it has none."""
        return self._ranks.of(view).choose(view, stage, excluded)

    def of_all(self, view: ClusterView, excluded: Collection[str]) -> InstanceView | None:
        """Return an active instance; None: there is none."""
        return self._ranks.of(view).choose(view, None, excluded)


class _Ranks:
    """The ranks of one set of instances."""

    def __init__(self) -> None:
        self._columns = Columns(_rank, 1)
        self._members = StageMembers()

    def choose(
        self, view: ClusterView, stage: Stage | None, excluded: Collection[str]
    ) -> InstanceView | None:
        ranks: Floats = self._columns.update(view)[0]
        seen = self._columns.seen
        if excluded:
            ranks = ranks.copy()
            ranks[[seen.at[name] for name in excluded if name in seen.at]] = math.inf
        if stage is None:
            if not len(ranks):
                return None
            first = int(ranks.argmin())
        else:
            members = self._members.of(stage, seen)
            if not len(members):
                return None
            among = ranks[members]
            # A stage may name its instances in any order.
            first = int(members[among == among.min()].min())
        return view.instances[seen.names[first]] if ranks[first] < math.inf else None


def _rank(instance: InstanceView) -> tuple[float]:
    """Return a number that orders instances by share of demand, then by requests; infinite: not active."""
    if instance.state is not InstanceState.ACTIVE:
        return (math.inf,)
    return (float(demand_share(instance) * _REQUESTS_MAX + instance.load),)


# Return prompts that wait in a stage that no longer covers their length, to be placed again (ours).
#
# Running requests are handed over with their KV. A waiting prompt has no KV, and would otherwise stay in the
# very queue that a new plan was made to relieve. The paper does not mention these.


def misplaced(view: ClusterView) -> list[ReturnPrompts]:
    """Return hand-backs of prompts that are misplaced by the view's stages, oldest first in each queue.

    A prompt moves to the end of another queue, so it moves only if fewer prompt tokens are ahead of it there
    than in its current queue.
    """
    stages = view.stages
    # Prompt tokens queued at the members of each stage, including those moved there by this decision.
    queues: dict[int, list[int]] = {}
    returns: list[ReturnPrompts] = []
    for at, stage in enumerate(stages):
        for instance in active_in(view, stage):
            if not instance.waiting:
                continue
            prompts = _prompts(instance)
            # Tokens of the prompts behind the current one.
            after = sum(request.context_tokens for request in prompts)
            returned_tokens = 0
            leaving: list[str] = []
            for request in prompts:
                after -= request.context_tokens
                to = earliest_stage(stages, request.context_tokens)
                if to == at or not _waits(request):
                    continue
                if to not in queues:
                    queues[to] = [i.prefill_backlog_tokens for i in active_in(view, stages[to])]
                before = instance.prefill_backlog_tokens - returned_tokens - after - request.context_tokens
                least = min(queues[to], default=before)
                if least < before:
                    queues[to][queues[to].index(least)] += request.context_tokens
                    returned_tokens += request.context_tokens
                    leaving.append(request.request_id)
            if leaving:
                returns.append(ReturnPrompts(instance.instance_id, tuple(leaving)))
    return returns


def _prompts(instance: InstanceView) -> Sequence[RequestView]:
    """Return the prompts in order of arrival; those without a known arrival time were just placed, and are
    last."""
    requests = table_of(instance.requests)
    return sorted(requests.where(requests.in_prefill), key=lambda request: request.arrival_s or math.inf)


def _waits(request: RequestView) -> bool:
    """Return whether the prompt has not started: nothing is computed, and it has no output yet."""
    return request.state is RequestState.WAITING and not request.output_tokens and not request.migrating
