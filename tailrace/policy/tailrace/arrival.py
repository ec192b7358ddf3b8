"""What an arrival costs on an instance, in two parts: what follows from its report alone, and the rest.

The same formulas hold for numbers, of one instance, and for columns, with one entry an instance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple

import numpy as np

from tailrace.perf.steps import Floats, Number, StepTimes
from tailrace.policy.tailrace.costs import Costs


@dataclass(frozen=True, slots=True)
class Bounds(Generic[Number]):
    """The larger and the smaller of two."""

    larger: Callable[[Number | float, Number], Number]
    smaller: Callable[[Number | float, Number], Number]


OF_ONE: Final[Bounds[float]] = Bounds(max, min)
OF_MANY: Final[Bounds[Floats]] = Bounds(np.maximum, np.minimum)


class Reported(NamedTuple, Generic[Number]):
    """Read off a view."""

    running: Number
    waiting: Number
    used: Number
    backlog: Number
    host: Number
    capacity: Number
    context: Number
    reasoning: Number
    # The most that is predicted.
    future: Number
    # Prompts that are known of, and their tokens.
    prompts: Number
    prompt_tokens: Number


class Offer(NamedTuple, Generic[Number]):
    """What arrivals see, whatever their length."""

    # Of the instance's step times.
    per_token_s: Number
    per_token_squared_s: Number
    chunk_tokens: Number
    # One decode step; what a second of decoding counts.
    step_s: Number
    hurry: Number
    # What decoding with the others costs, and as much again per prompt token: without a penalty, which makes
    # that no sum of the two.
    joining_s: Number
    joining_s_per_token: Number
    # Those that run or wait.
    requests: Number
    # Prompts of which nothing but the sum is known.
    unknown: Number
    unknown_s: Number
    # KV: spoken for, now or as predicted; all that there is; used, but at least 1.
    spoken_for: Number
    capacity: Number
    used: Number
    # Mean length of the requests, and by how much a step of all gets dearer with one more of that: without a
    # penalty.
    mean_tokens: Number
    mean_dearer_s: Number


class Before(NamedTuple, Generic[Number]):
    """What is served before an arrival: tokens, seconds of prefill; and how many prompts after it."""

    tokens: Number
    seconds: Number
    after: Number


def offer(
    costs: Costs, reported: Reported[Number], steps: StepTimes[Number], bounds: Bounds[Number]
) -> Offer[Number]:
    """What follows from the report alone."""
    running, used = reported.running, reported.used
    requests = running + reported.waiting
    held = used + reported.backlog
    step_s = steps.decode_s(running, used)
    hurry = _hurry(costs, reported, step_s, bounds)
    mean_tokens = reported.context // bounds.larger(1.0, requests)
    joining_s = joining_s_per_token = mean_dearer_s = 0.0 * step_s
    if costs.penalty is None:
        each = hurry * costs.expected_tokens
        joined_s = steps.decode_s(requests, held)
        joining_s = each * (joined_s + (requests + 1.0) * steps.per_request_s)
        joining_s_per_token = each * (requests + 1.0) * steps.per_kv_token_s
        mean_s = steps.per_request_s + steps.per_kv_token_s * mean_tokens
        mean_dearer_s = joined_s + (requests + 1.0) * mean_s
    unknown = bounds.larger(0.0, reported.backlog - reported.prompt_tokens)
    return Offer(
        per_token_s=steps.per_token_s,
        per_token_squared_s=steps.per_token_squared_s,
        chunk_tokens=steps.chunk_tokens,
        step_s=step_s,
        hurry=hurry,
        joining_s=joining_s,
        joining_s_per_token=joining_s_per_token,
        requests=requests,
        unknown=unknown,
        unknown_s=steps.backlog_s(unknown, bounds.larger(1.0, reported.waiting - reported.prompts)),
        spoken_for=bounds.larger(reported.future, held + reported.host),
        capacity=reported.capacity,
        used=bounds.larger(1.0, used),
        mean_tokens=mean_tokens,
        mean_dearer_s=mean_dearer_s,
    )


def _hurry(costs: Costs, reported: Reported[Number], step_s: Number, bounds: Bounds[Number]) -> Number:
    """What a second of those who decode there counts, from 0 to 1.

    Reasoning is a wait for the first token, and counts whole. Who reads an answer is not late yet, and counts
    by the square of a step's share of the TPOT SLO: as a wait does, next to nothing at first.
    """
    prompts = reported.prompts
    decoding = bounds.larger(1.0, reported.running + reported.waiting - prompts)
    reasons = bounds.smaller(1.0, bounds.larger(0.0, reported.reasoning - prompts) / decoding)
    share = bounds.smaller(1.0, step_s / costs.tpot_slo_s)
    return reasons + (1.0 - reasons) * share * share


def prefill_s(offered: Offer[Number], prompt_tokens: int) -> Number:
    """The arrival's own, without the bases of its steps."""
    return (offered.per_token_s + offered.per_token_squared_s * prompt_tokens) * prompt_tokens


def prefill_after_s(offered: Offer[Number], prompt_tokens: int, cached_tokens: Number | float) -> Number:
    """The same where KV of its first tokens is there."""
    found_s = (offered.per_token_s + offered.per_token_squared_s * cached_tokens) * cached_tokens
    return prefill_s(offered, prompt_tokens) - found_s


def without_kv_s(
    offered: Offer[Number],
    prompt_tokens: int,
    cached_tokens: Number | float,
    before: Before[Number],
    patience_s: float,
    bounds: Bounds[Number],
) -> Number:
    """Its wait, its prefill, and, without a penalty, decoding with the others. `cached_tokens` of the
    prompt need not be computed there."""
    own_s = prefill_after_s(offered, prompt_tokens, cached_tokens)
    chunks, step_s = offered.chunk_tokens, offered.step_s
    wait_s = own_s + ((prompt_tokens - cached_tokens) / chunks + 1.0) * step_s
    wait_s = wait_s + (before.seconds + before.tokens / chunks * step_s)
    others = bounds.larger(0.0, offered.requests - before.after)
    joining_s = offered.joining_s + offered.joining_s_per_token * prompt_tokens
    waiting_s = wait_s * (1.0 + wait_s / patience_s)
    return joining_s + (waiting_s + own_s * (before.after + offered.hurry * others))


def shortage_s(
    costs: Costs, offered: Offer[Number], more_tokens: Number | float, bounds: Bounds[Number]
) -> Number:
    """Wait for KV, as `Costs.shortage_s` has it."""
    over = offered.spoken_for + more_tokens - offered.capacity
    return costs.freeing_s(bounds.larger(0.0, over), offered.step_s, offered.used)


def mean_joining_s(costs: Costs, offered: Offer[Number], bounds: Bounds[Number]) -> Number:
    """One more request of mean length, as `Costs.joining_s` has it; without a penalty."""
    remaining = costs.expected_tokens
    dearer_s = remaining * offered.mean_dearer_s
    return dearer_s + shortage_s(costs, offered, offered.mean_tokens + remaining, bounds)
