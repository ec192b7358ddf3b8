"""The cost of swaps: the simulator waits as long as the profile says."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from simulator.cluster import ClusterSpec
from simulator.request import SimRequest
from tailrace.intra.orders import QuantumRoundRobin
from tailrace.policy.round_robin import RoundRobin
from tailrace.profiles import SwapModel
from tests.simulator.worlds import PROFILE, Watched

BLOCK = 8


def token_times(swap: SwapModel) -> tuple[dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]], int]:
    """Return the token times of two requests that compete for room for one, and the number of swaps."""
    profile = msgspec.structs.replace(PROFILE, swap=swap)
    spec = ClusterSpec.uniform(1, profile, kv_capacity_tokens=15 * BLOCK, block_tokens=BLOCK)
    requests = [SimRequest("first", 0.0, 30, 0, 60), SimRequest("second", 0.001, 96, 0, 5)]
    simulation = Watched(spec, requests, RoundRobin(), QuantumRoundRobin(quantum_tokens=30))
    result = simulation.run(None)
    return simulation.token_times, sum(record.preemptions_swapped for record in result.requests)


def test_a_step_waits_for_the_base_time_and_the_bytes_of_each_swap() -> None:
    free, swaps = token_times(SwapModel(base_ms=0.0, bytes_per_s=1e30))
    assert swaps == 1
    slow, swaps = token_times(SwapModel(base_ms=7.0, bytes_per_s=1e9))
    assert swaps == 1
    # Swapped out and in with 30 prompt tokens and 30 output tokens.
    kv_bytes = -(-60 // BLOCK) * BLOCK * PROFILE.kv_bytes_per_token
    once_s = 7e-3 + kv_bytes / 1e9
    assert slow["second"][0] - free["second"][0] == pytest.approx(once_s)
    assert slow["first"][29] == pytest.approx(free["first"][29])
    assert slow["first"][30] - free["first"][30] == pytest.approx(2 * once_s)
