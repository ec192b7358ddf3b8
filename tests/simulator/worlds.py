"""Small workloads and clusters for the simulator's tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from simulator.cluster import ClusterSpec
from simulator.events import NEVER
from simulator.instance import Instance
from simulator.job import Job
from simulator.request import SimRequest
from simulator.simulation import Simulation
from simulator.steplog import TokenTimes
from tailrace.intra.base import IntraPolicy
from tailrace.intra.earliest_due import EarliestDue
from tailrace.intra.orders import DecodeFirst, Fcfs, QuantumRoundRobin
from tailrace.intra.pascal import PascalQueue
from tailrace.policy.base import Policy
from tailrace.profiles import DecodeModel, PrefillModel, Profile

PROFILE = Profile(
    name="test",
    model="none",
    gpu="none",
    prefill=PrefillModel(base_ms=4.0, ms_per_token=0.05, ms_per_token_squared=1e-5),
    decode=DecodeModel(base_ms=7.0, ms_per_request=0.1, ms_per_kv_token=0.003),
    kv_bytes_per_token=100_000,
    kv_capacity_tokens=2_000,
    sources={},
)

INTRA: dict[str, IntraPolicy] = {
    "fcfs": Fcfs(),
    "decode_first": DecodeFirst(),
    "round_robin": QuantumRoundRobin(quantum_tokens=13),
    "pascal": PascalQueue(quantum_tokens=13, demotion_tokens=120),
    "fcfs_passing": Fcfs(pass_over=0.4),
    "earliest_due": EarliestDue(lead_s=0.1, late_s=1.0, ttft_slo_s=0.3, pace_s=0.02),
    "pascal_passing": PascalQueue(quantum_tokens=13, demotion_tokens=120, pass_over=1.0),
}


@st.composite
def workloads(draw: st.DrawFn, most: int = 14, span_s: float = 2.0) -> list[SimRequest]:
    """Draw requests that fit into 320 tokens of KV."""
    count = draw(st.integers(1, most))
    return [
        SimRequest(
            request_id=f"r{n}",
            # Irrational, so that no request arrives exactly at the end of a step.
            arrival_s=draw(st.integers(0, 1_000)) / 1_000 * span_s + math.pi * (n + 1) / 1e5,
            prompt_tokens=draw(st.integers(1, 100)),
            reasoning_tokens=draw(st.sampled_from([0, 0, 1, 2, 20, 90])),
            answer_tokens=draw(st.integers(1, 120)),
        )
        for n in range(count)
    ]


class Watched(Simulation):
    """A simulation that records the time of every token."""

    def __init__(
        self,
        spec: ClusterSpec,
        requests: Sequence[SimRequest],
        policy: Policy,
        intra: IntraPolicy,
        max_steps: int = NEVER,
    ) -> None:
        self.token_times: dict[str, NDArray[np.float64]] = {}
        super().__init__(spec, requests, policy, intra, seed=0, sample_interval_s=None, max_steps=max_steps)

    def _complete(self, job: Job) -> None:
        if job.history:
            times = TokenTimes()
            job.copy_times(0, times)
            self.token_times[job.request.request_id] = times.all_s()
        super()._complete(job)


def recount(instance: Instance) -> None:
    """Assert that all counts of an instance equal a recount of its requests."""
    boundary, size = instance.boundary, instance.block_tokens
    contexts = [job.prompt + job.tokens_at(boundary) for job in instance.decoding]
    others = [*instance.paused, *(job for _, job in instance.prefilling)]
    idle = [*others, *(job for _, job in instance.waiting)]
    held = sum(-(-c // size) for c in contexts) + sum(job.blocks for job in others)
    used = instance.used_blocks_at(boundary)
    # Blocks reserved for imports are in use too.
    assert held <= used <= instance.total_blocks
    if not instance.migrations_in:
        assert held == used
    assert instance.decode_tokens_at(boundary) == sum(contexts)
    assert instance.idle_context == sum(job.prompt + job.tokens for job in idle)
    backlog = [job for job in idle if job.state.value in ("queued", "prefilling")]
    assert instance.backlog_at(boundary) == sum(job.prefill_total - job.prefill_done for job in backlog)
    assert instance.slots_taken <= instance.spec.max_num_seqs
    assert instance.waiting == sorted(instance.waiting, key=lambda entry: entry[0])
    assert instance.host_blocks * instance.spec.block_bytes <= instance.spec.host_kv_bytes


def assert_empty(instance: Instance) -> None:
    """Assert that no request and no KV is left on an instance."""
    boundary = instance.boundary
    assert not instance.decoding and not instance.prefilling and not instance.waiting and not instance.paused
    assert instance.used_blocks_at(boundary) == 0
    assert instance.host_blocks == 0
    assert instance.decode_tokens_at(boundary) + instance.idle_context == 0
    assert instance.backlog_at(boundary) == 0
    assert instance.slots_taken == 0
    assert instance.migrations_in == instance.migrations_out == 0
