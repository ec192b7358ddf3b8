"""Shares of requests in the counts by phase."""

from __future__ import annotations

import math

import pytest

from tailrace.cluster import Phase, RequestState, RequestView
from tailrace.policy.requests import phase_share


@pytest.mark.parametrize("state", RequestState)
@pytest.mark.parametrize("phase_tokens", [0, 1])
def test_only_an_answer_without_tokens_off_the_device_has_no_slack(
    state: RequestState, phase_tokens: int
) -> None:
    request = RequestView("r", "a", Phase.ANSWERING, state, 1, 1, 1, phase_tokens=phase_tokens)
    blocked = not phase_tokens and state in (RequestState.WAITING, RequestState.PREEMPTED)
    assert phase_share(request, 500) == (False, True, -math.inf if blocked else math.inf)
