"""Delays between retries."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tailrace.service.tasks import Backoff


@given(st.integers(0, 2**32), st.integers(1, 200))
def test_delays_grow_stay_bounded_and_differ(seed: int, attempts: int) -> None:
    backoff = Backoff(0.1, 1.0, random.Random(seed).random)
    delays = [backoff.next_s() for _ in range(attempts)]
    assert 0.05 <= delays[0] <= 0.1
    assert all(0.05 <= delay <= 1.0 for delay in delays)
    assert all(delay >= 0.5 for delay in delays[5:])
    assert len(set(delays)) == len(delays)
    backoff.reset()
    assert backoff.next_s() <= 0.1


def test_clients_of_a_lost_peer_do_not_retry_simultaneously() -> None:
    delays = [Backoff(0.1, 1.0, random.Random(seed).random).next_s() for seed in range(1000)]
    assert max(delays) - min(delays) > 0.045
