"""The cost of an arrival on one instance, term by term as in docs/policy-tailrace.md: the reference."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.cluster import InstanceView, Phase
from tailrace.intra.earliest_due import PREFILLS, due_s, nominal_s
from tailrace.policy.requests import table_of
from tailrace.policy.tailrace.costs import Costs, Longest


def arrival_s(
    costs: Costs, instance: InstanceView, prompt: int, now: float, patience_s: float, cached: int = 0
) -> float:
    """Return the cost in seconds, summed over all affected requests.

    `cached` is the number of prompt tokens that need not be computed there.
    """
    steps = costs.steps_of(instance)
    backlog = instance.prefill_backlog_tokens
    requests = instance.running + instance.waiting
    held = instance.kv_used_tokens + backlog
    step_s = steps.decode_s(instance.running, instance.kv_used_tokens)
    waiting = [r for r in instance.requests if r.phase is Phase.PREFILL] if backlog else []
    queued = sorted((r.arrival_s, r.prompt_tokens) for r in waiting)
    prompts = sorted(
        (due_s(at_s, length, _queue_s(queued[:n])), length) for n, (at_s, length) in enumerate(queued)
    )

    # Served before it: the unlisted part of the backlog, then prompts due earlier, less what is computed.
    known = sum(length for _, length in prompts)
    unknown = max(0, backlog - known)
    done = max(0, known - backlog)
    found_s = 0.0
    for _, length in prompts:
        computed = min(done, length)
        done -= computed
        found_s += nominal_s(length - computed, length**2 - computed**2)
    first = [length for due, length in prompts if due <= due_s(now, prompt, found_s)]
    left = max(0, sum(first) - max(0, known - backlog))
    before_s = 0.0
    for length in first:
        before_s += steps.compute_s(length)
    before_s = before_s * left / sum(first) if left else 0.0
    before_s += steps.backlog_s(unknown, max(1, instance.waiting - len(prompts)))
    own_s = steps.compute_s(prompt) - steps.compute_s(cached)
    wait_s = own_s + ((prompt - cached) / steps.chunk_tokens + 1.0) * step_s
    wait_s += before_s + (left + unknown) / steps.chunk_tokens * step_s

    # The requests that its prefill delays.
    after = len(prompts) - len(first)
    others = max(0, requests - after)
    reasoning = table_of(instance.requests).phase_load().reasoning
    decoding = max(1, requests - len(prompts))
    reasons = min(1.0, max(0, reasoning - len(prompts)) / decoding)
    share = min(1.0, step_s / costs.tpot_slo_s)
    decode_weight = reasons + (1.0 - reasons) * share * share

    remaining = costs.expected_tokens
    cost_s = 0.0
    if costs.penalty is None:
        each = decode_weight * remaining
        cost_s = each * (steps.decode_s(requests, held) + (requests + 1) * steps.per_request_s)
        cost_s += each * (requests + 1) * steps.per_kv_token_s * prompt
    cost_s += wait_s * (1.0 + wait_s / patience_s) + own_s * (after + decode_weight * others)
    if costs.penalty is not None:
        cost_s += decode_weight * remaining * costs.slowdown_s(instance, prompt, Longest.of(instance).tokens)
    return cost_s + costs.shortage_s(instance, prompt + remaining)


def _queue_s(prompts: Sequence[tuple[float, int]]) -> float:
    return sum(nominal_s(length, length * length) for _, length in prompts)


def cheapest(costs: Costs, instances: Sequence[InstanceView], prompt: int, now: float) -> InstanceView:
    """Return the first of the instances with the lowest cost."""
    own_s = costs.steps_of(instances[0]).compute_s(prompt)
    patience_s = costs.patience_s + PREFILLS * own_s
    return min(instances, key=lambda i: arrival_s(costs, i, prompt, now, patience_s))
