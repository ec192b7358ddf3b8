"""Prompts that wait in a stage that is no longer theirs: they are handed back, to be placed anew.

What runs outgrows its stage and is handed over; what waits has no KV to hand over and would stay in the queue
that a plan was made to relieve. The paper does not speak of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tailrace.actions import HandBack
from tailrace.cluster import ClusterView, InstanceView, Phase, RequestState, RequestView
from tailrace.policy.cascade.layout import active_in, earliest_stage


def misplaced(view: ClusterView) -> list[HandBack]:
    """Of the view's stages, which are those that placements go by. Oldest first in each queue.

    A prompt goes only where fewer prompt tokens are before it than where it waits: it goes to the end of a
    queue.
    """
    stages = view.stages
    # Prompt tokens that wait at the members of a stage, and what is given to them here.
    queues: dict[int, list[int]] = {}
    found: list[HandBack] = []
    for at, stage in enumerate(stages):
        for instance in active_in(view, stage):
            if not instance.waiting:
                continue
            prompts = _prompts(instance)
            # Of the prompts after it in the queue, which it does not wait for.
            after = sum(request.context_tokens for request in prompts)
            given = 0
            leaving: list[str] = []
            for request in prompts:
                after -= request.context_tokens
                to = earliest_stage(stages, request.context_tokens)
                if to == at or not _waits(request):
                    continue
                if to not in queues:
                    queues[to] = [i.prefill_backlog_tokens for i in active_in(view, stages[to])]
                before = instance.prefill_backlog_tokens - given - after - request.context_tokens
                least = min(queues[to], default=before)
                if least < before:
                    queues[to][queues[to].index(least)] += request.context_tokens
                    given += request.context_tokens
                    leaving.append(request.request_id)
            if leaving:
                found.append(HandBack(instance.instance_id, tuple(leaving)))
    return found


def _prompts(instance: InstanceView) -> Sequence[RequestView]:
    """Those that are to be prefilled, first come first; of who was placed just now it is not known when."""
    prompts = [request for request in instance.requests if request.phase is Phase.PREFILL]
    prompts.sort(key=lambda request: request.arrival_s or math.inf)
    return prompts


def _waits(request: RequestView) -> bool:
    """Nothing of it is computed here, and it has made no token elsewhere."""
    return request.state is RequestState.WAITING and not request.output_tokens and not request.migrating
