"""Hand back prompts that wait in a stage that no longer covers their length, to be placed again (ours).

Running requests are handed over with their KV. A waiting prompt has no KV, and would otherwise stay in the
very queue that a new plan was made to relieve. The paper does not mention these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tailrace.actions import HandBack
from tailrace.cluster import ClusterView, InstanceView, RequestState, RequestView
from tailrace.policy.cascade.layout import active_in, earliest_stage
from tailrace.policy.requests import table_of


def misplaced(view: ClusterView) -> list[HandBack]:
    """Return hand-backs of prompts that are misplaced by the view's stages, oldest first in each queue.

    A prompt moves to the end of another queue, so it moves only if fewer prompt tokens are ahead of it there
    than in its current queue.
    """
    stages = view.stages
    # Prompt tokens queued at the members of each stage, including those moved there by this decision.
    queues: dict[int, list[int]] = {}
    hand_backs: list[HandBack] = []
    for at, stage in enumerate(stages):
        for instance in active_in(view, stage):
            if not instance.waiting:
                continue
            prompts = _prompts(instance)
            # Tokens of the prompts behind the current one.
            after = sum(request.context_tokens for request in prompts)
            handed_back_tokens = 0
            leaving: list[str] = []
            for request in prompts:
                after -= request.context_tokens
                to = earliest_stage(stages, request.context_tokens)
                if to == at or not _waits(request):
                    continue
                if to not in queues:
                    queues[to] = [i.prefill_backlog_tokens for i in active_in(view, stages[to])]
                before = instance.prefill_backlog_tokens - handed_back_tokens - after - request.context_tokens
                least = min(queues[to], default=before)
                if least < before:
                    queues[to][queues[to].index(least)] += request.context_tokens
                    handed_back_tokens += request.context_tokens
                    leaving.append(request.request_id)
            if leaving:
                hand_backs.append(HandBack(instance.instance_id, tuple(leaving)))
    return hand_backs


def _prompts(instance: InstanceView) -> Sequence[RequestView]:
    """Return the prompts in order of arrival; those without a known arrival time were just placed, and are
    last."""
    requests = table_of(instance.requests)
    return sorted(requests.where(requests.in_prefill), key=lambda request: request.arrival_s or math.inf)


def _waits(request: RequestView) -> bool:
    """Return whether the prompt has not started: nothing is computed, and it has no output yet."""
    return request.state is RequestState.WAITING and not request.output_tokens and not request.migrating
