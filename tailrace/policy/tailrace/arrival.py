"""The cost of an arrival on an instance, in two parts: terms that depend on the instance's report alone
(`Offer`), and terms that also depend on the arrival.

The formulas apply to scalars, for one instance, and to arrays with one entry per instance.
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
    """Maximum and minimum, of scalars or elementwise."""

    larger: Callable[[Number | float, Number], Number]
    smaller: Callable[[Number | float, Number], Number]


OF_ONE: Final[Bounds[float]] = Bounds(max, min)
OF_MANY: Final[Bounds[Floats]] = Bounds(np.maximum, np.minimum)


class Reported(NamedTuple, Generic[Number]):
    """Fields of an `InstanceView`: counts of requests, and tokens."""

    running: Number
    waiting: Number
    used: Number
    backlog: Number
    host: Number
    capacity: Number
    context: Number
    reasoning: Number
    # The largest predicted load.
    future: Number
    # Prompts that the view lists, and their tokens.
    prompts: Number
    prompt_tokens: Number


class Offer(NamedTuple, Generic[Number]):
    """What an instance offers to any arrival, independent of the arrival's length."""

    # Coefficients of the instance's step times.
    per_token_s: Number
    per_token_squared_s: Number
    chunk_tokens: Number
    # Duration of a decode step, and the weight of a second of decoding (`_decode_weight`).
    step_s: Number
    decode_weight: Number
    # Cost of decoding with the other requests: a constant, and a part per prompt token. 0 with a length
    # penalty, for which the cost is not linear in the tokens.
    joining_s: Number
    joining_s_per_token: Number
    # Requests running or waiting.
    requests: Number
    # Backlog of prompts that the view does not list: tokens, and seconds of prefill.
    unlisted: Number
    unlisted_s: Number
    # KV tokens: committed now or by prediction; capacity; used, at least 1.
    committed: Number
    capacity: Number
    used: Number
    # Mean length of the requests, and the increase of the batch's step cost by one more request of that
    # length; 0 with a length penalty.
    mean_tokens: Number
    mean_slowdown_s: Number


class QueueAhead(NamedTuple, Generic[Number]):
    """The queue as an arrival finds it: prompt tokens and seconds of prefill served before it, and the number
    of prompts served after it."""

    tokens: Number
    seconds: Number
    after: Number


def offer(
    costs: Costs, reported: Reported[Number], steps: StepTimes[Number], bounds: Bounds[Number]
) -> Offer[Number]:
    """Compute the terms that depend on the instance's report alone."""
    running, used = reported.running, reported.used
    requests = running + reported.waiting
    held = used + reported.backlog
    step_s = steps.decode_s(running, used)
    decode_weight = _hurry(costs, reported, step_s, bounds)
    mean_tokens = reported.context // bounds.larger(1.0, requests)
    joining_s = joining_s_per_token = mean_slowdown_s = 0.0 * step_s
    if costs.penalty is None:
        per_request = decode_weight * costs.expected_tokens
        joined_s = steps.decode_s(requests, held)
        joining_s = per_request * (joined_s + (requests + 1.0) * steps.per_request_s)
        joining_s_per_token = per_request * (requests + 1.0) * steps.per_kv_token_s
        mean_s = steps.per_request_s + steps.per_kv_token_s * mean_tokens
        mean_slowdown_s = joined_s + (requests + 1.0) * mean_s
    unlisted = bounds.larger(0.0, reported.backlog - reported.prompt_tokens)
    return Offer(
        per_token_s=steps.per_token_s,
        per_token_squared_s=steps.per_token_squared_s,
        chunk_tokens=steps.chunk_tokens,
        step_s=step_s,
        decode_weight=decode_weight,
        joining_s=joining_s,
        joining_s_per_token=joining_s_per_token,
        requests=requests,
        unlisted=unlisted,
        unlisted_s=steps.backlog_s(unlisted, bounds.larger(1.0, reported.waiting - reported.prompts)),
        committed=bounds.larger(reported.future, held + reported.host),
        capacity=reported.capacity,
        used=bounds.larger(1.0, used),
        mean_tokens=mean_tokens,
        mean_slowdown_s=mean_slowdown_s,
    )


def _hurry(costs: Costs, reported: Reported[Number], step_s: Number, bounds: Bounds[Number]) -> Number:
    """Return the mean weight of a second of delay for the decoding requests, from 0 to 1.

    A reasoning request counts fully, because its user waits for the first token. An answering request counts
    by the square of the step's share of the TPOT SLO: little while the answer is well within its SLO.
    """
    prompts = reported.prompts
    decoding = bounds.larger(1.0, reported.running + reported.waiting - prompts)
    reasoning_share = bounds.smaller(1.0, bounds.larger(0.0, reported.reasoning - prompts) / decoding)
    slo_share = bounds.smaller(1.0, step_s / costs.tpot_slo_s)
    return reasoning_share + (1.0 - reasoning_share) * slo_share * slo_share


def prefill_s(offered: Offer[Number], prompt_tokens: int) -> Number:
    """Return the seconds of the arrival's prefill, excluding the constant per-step overhead."""
    return (offered.per_token_s + offered.per_token_squared_s * prompt_tokens) * prompt_tokens


def prefill_after_s(offered: Offer[Number], prompt_tokens: int, cached_tokens: Number | float) -> Number:
    """Return the same if the first `cached_tokens` of the prompt are cached."""
    saved_s = (offered.per_token_s + offered.per_token_squared_s * cached_tokens) * cached_tokens
    return prefill_s(offered, prompt_tokens) - saved_s


def cost_without_shortage_s(
    offered: Offer[Number],
    prompt_tokens: int,
    cached_tokens: Number | float,
    before: QueueAhead[Number],
    patience_s: float,
    bounds: Bounds[Number],
) -> Number:
    """Return the cost of queueing, prefill and (without a length penalty) decoding, in seconds.

    `cached_tokens` of the prompt need not be computed.
    """
    own_s = prefill_after_s(offered, prompt_tokens, cached_tokens)
    chunks, step_s = offered.chunk_tokens, offered.step_s
    wait_s = own_s + ((prompt_tokens - cached_tokens) / chunks + 1.0) * step_s
    wait_s = wait_s + (before.seconds + before.tokens / chunks * step_s)
    others = bounds.larger(0.0, offered.requests - before.after)
    joining_s = offered.joining_s + offered.joining_s_per_token * prompt_tokens
    waiting_s = wait_s * (1.0 + wait_s / patience_s)
    return joining_s + (waiting_s + own_s * (before.after + offered.decode_weight * others))


def shortage_s(
    costs: Costs, offered: Offer[Number], more_tokens: Number | float, bounds: Bounds[Number]
) -> Number:
    """Return the wait for KV, as in `Costs.shortage_s`."""
    over = offered.committed + more_tokens - offered.capacity
    return costs.freeing_s(bounds.larger(0.0, over), offered.step_s, offered.used)


def mean_joining_s(costs: Costs, offered: Offer[Number], bounds: Bounds[Number]) -> Number:
    """Return the cost of one more request of mean length, as in `Costs.joining_s`, without a length
    penalty."""
    remaining = costs.expected_tokens
    slowdown_s = remaining * offered.mean_slowdown_s
    return slowdown_s + shortage_s(costs, offered, offered.mean_tokens + remaining, bounds)
