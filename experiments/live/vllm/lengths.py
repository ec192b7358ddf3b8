"""Measure the cost of unequal lengths on one real engine: steps of equal and of unequal contexts with the
same KV.

CascadeInfer sorts requests by length because of this cost (its figure 2: a factor of 1.1 to 2.1 at batches of
512). If it is a few percent, sorting can gain nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from experiments.live.vllm.check import Disturbed
from experiments.live.vllm.plan import progress
from tests.harness.loadgen import completion_request, run_streams
from tests.harness.servers import MODEL
from tests.harness.vllm_fleet import MAX_LEN, Fleet

_REQUESTS: Final = 8
_OUTPUT: Final = 512
# The tiny model's tokens are bytes.
_MEAN: Final = 320
_LONGEST: Final = 2_000
_PAIRS: Final = 3


async def spread_over_equal(fleet: Fleet) -> float:
    """Return the ratio of a decode step of one long and seven short contexts to one of eight equal contexts.

    Both batches have the same total KV; the result is the median of alternating pairs. `fleet`: of one
    instance.
    """
    short = (_REQUESTS * _MEAN - _LONGEST) // (_REQUESTS - 1)
    assert _LONGEST + _OUTPUT <= MAX_LEN
    equal = [_MEAN] * _REQUESTS
    spread = [_LONGEST] + [short] * (_REQUESTS - 1)
    await fleet.clear()
    pairs = [(await _step(fleet, spread), await _step(fleet, equal)) for _ in range(_PAIRS)]
    ratios = [ours / theirs for ours, theirs in pairs]
    found = statistics.median(ratios)
    progress(f"  a step of unequal lengths takes {found:.3f} times one of equal ones ({_PAIRS} pairs)")
    return found


async def _step(fleet: Fleet, prompts: Sequence[int]) -> float:
    """Return the mean seconds of a step while all of these decode, one token each per step."""
    requests = [completion_request(fleet.url, MODEL, "x" * tokens, _OUTPUT) for tokens in prompts]
    results = await run_streams(fleet.url, requests)
    for result in results:
        if result.error:
            raise Disturbed(f"measuring unequal lengths: {result.error}")
        if len(result.event_times) < _OUTPUT:
            raise Disturbed(
                f"measuring unequal lengths: {len(result.event_times)} events of {_OUTPUT} tokens"
            )
    # The events after the last token have the finish reason and the usage.
    times = [result.event_times[:_OUTPUT] for result in results]
    # All decode concurrently from when the last has begun until the first has ended.
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    # Tokens of several steps often arrive in one read, so derive the step time from their number in that
    # period.
    tokens = sum(begin < at <= end for each in times for at in each)
    return (end - begin) * len(times) / tokens
