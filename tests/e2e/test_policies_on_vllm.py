"""Slow: policies switched under load on real engines; the trace of a request that moves. `make soak`."""

from __future__ import annotations

import pytest

from examples import life_of_a_request
from experiments.live.vllm import switch
from experiments.live.vllm.plan import Bench, Scale

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]


async def test_switching_through_every_policy_for_two_minutes() -> None:
    async with Bench(Scale.full(1)) as bench:
        (comparison,) = await switch.run(bench)
    equal, requests = comparison.answers
    assert requests > 0 and comparison.passed, [run.failed for run in comparison.runs]
    assert equal == requests


def test_trace_shows_a_request_moved_for_four_reasons() -> None:
    assert life_of_a_request.main() == 0
