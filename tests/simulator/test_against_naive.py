"""Computing runs of steps in closed form gives the same token times as simulating each step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.cluster import ClusterSpec
from simulator.request import SimRequest
from tailrace.policy.round_robin import RoundRobin
from tailrace.qoe import TokenRun, qoe
from tests.simulator.naive import Naive
from tests.simulator.worlds import INTRA, PROFILE, Watched, assert_empty, workloads


@pytest.mark.parametrize("intra", INTRA)
@settings(max_examples=20, deadline=None)
@given(
    requests=workloads(),
    kv_tokens=st.sampled_from([330, 500, 2_000]),
    host_tokens=st.sampled_from([0, 200, 10_000]),
    slots=st.sampled_from([2, 5, 64]),
    budget=st.sampled_from([7, 64, 512]),
)
def test_token_times_equal_those_of_the_naive_simulation(
    intra: str, requests: list[SimRequest], kv_tokens: int, host_tokens: int, slots: int, budget: int
) -> None:
    spec = ClusterSpec.uniform(
        1,
        PROFILE,
        kv_capacity_tokens=kv_tokens,
        block_tokens=8,
        host_kv_bytes=host_tokens * PROFILE.kv_bytes_per_token,
        max_num_seqs=slots,
        chunk_budget_tokens=budget,
    )
    simulation = Watched(spec, requests, RoundRobin(), INTRA[intra])
    result = simulation.run(None)
    expected = Naive(spec.instances[0], requests, INTRA[intra]).run()
    assert [record.request_id for record in result.requests] == [r.request_id for r in requests]
    for record in result.requests:
        job = expected[record.request_id]
        np.testing.assert_allclose(simulation.token_times[record.request_id], job.times, rtol=0, atol=1e-9)
        assert record.preemptions_swapped == job.swaps
        assert record.preemptions_recomputed == job.recomputes
        assert record.first_token_s == pytest.approx(job.times[0], abs=1e-9)
        assert record.first_answer_s == pytest.approx(job.times[record.reasoning_tokens], abs=1e-9)
        assert record.finish_s == pytest.approx(job.times[-1], abs=1e-9)
        if record.answer_tokens > 1:
            answering = job.times[record.reasoning_tokens :]
            assert record.tpot_s == pytest.approx(np.diff(answering).mean(), abs=1e-9)
            tokens = [TokenRun(at_s, 0.0, 1) for at_s in answering]
            assert record.qoe == pytest.approx(qoe(tokens, spec.tpot_target_s), abs=1e-3)
    assert_empty(simulation.instances[0])
