"""Each closed form, compared with the sum or step-by-step computation that it replaces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from simulator.blocks import DecodeBlocks, blocks_for
from simulator.cluster import ClusterSpec, LinkSpec
from simulator.events import EventQueue
from simulator.intervals import StepRunIntervals
from simulator.network import Network
from simulator.request import SimRequest
from simulator.simulation import simulate
from simulator.steplog import StepLog, StepRun, TokenTimes, elapsed, last_s, steps_within
from tailrace.intra.orders import Fcfs
from tailrace.policy.round_robin import RoundRobin
from tests.simulator.worlds import PROFILE


@given(
    contexts=st.lists(st.integers(1, 200), min_size=1, max_size=12),
    boundary=st.integers(0, 1_000),
    steps=st.integers(0, 90),
    free=st.integers(0, 60),
)
def test_blocks_of_a_batch_equal_a_recount(contexts: list[int], boundary: int, steps: int, free: int) -> None:
    blocks = DecodeBlocks(16)
    residues = [blocks.add(context, boundary) for context in contexts]

    def used(after: int) -> int:
        return sum(blocks_for(context + after, 16) for context in contexts)

    assert blocks.used == used(0)
    assert blocks.allocated(boundary, steps) == used(steps) - used(0)
    until = blocks.steps_until(boundary, free, 200)
    expected = next((n for n in range(1, 200) if used(n) - used(0) > free), 200)
    assert until == expected
    blocks.advance(boundary, steps)
    for context, residue in zip(contexts, residues, strict=True):
        blocks.remove(context + steps, residue)
    assert (blocks.used, blocks.requests) == (0, 0)


@given(
    first=st.floats(1e-4, 1.0),
    increment=st.sampled_from([0.0, 1e-9, 1e-6, 1e-3]),
    most=st.integers(1, 5_000),
    share=st.floats(0.0, 1.2),
)
def test_steps_within_is_the_inverse_of_elapsed(
    first: float, increment: float, most: int, share: float
) -> None:
    seconds = elapsed(first, increment, most) * share
    steps = steps_within(first, increment, seconds, most)
    assert 0 <= steps <= most
    assert not steps or elapsed(first, increment, steps) <= seconds
    assert steps == most or elapsed(first, increment, steps + 1) > seconds


@given(
    runs=st.lists(
        st.tuples(st.integers(1, 9), st.floats(0.01, 1.0), st.floats(0.0, 0.01)), min_size=1, max_size=400
    ),
    data=st.data(),
)
def test_token_times_between_boundaries(runs: list[tuple[int, float, float]], data: st.DataObject) -> None:
    log = StepLog()
    ends: list[float] = []
    now = 0.0
    for steps, first, increment in runs:
        now += 0.1
        log.open(len(ends), now, first, increment)
        log.close(steps)
        ends += [now + elapsed(first, increment, step + 1) for step in range(steps)]
        now = ends[-1]
    start = data.draw(st.integers(0, len(ends) - 1))
    end = data.draw(st.integers(start + 1, len(ends)))
    times = TokenTimes()
    log.copy(start, end, times)
    np.testing.assert_allclose(times.all_s(), ends[start:end], rtol=1e-12)
    assert last_s(*times.columns())[-1] == pytest.approx(ends[end - 1])


def _arrivals(link: LinkSpec, sends: list[tuple[float, str, str, int]]) -> list[float]:
    events = EventQueue()
    network = Network(link, events)
    done = [0.0] * len(sends)

    def begin(index: int) -> None:
        at_s, source, target, size = sends[index]

        def finish(now: float) -> None:
            done[index] = now

        events.schedule(at_s, lambda now: network.send(source, target, size, now, finish))

    for index in range(len(sends)):
        begin(index)
    while events:
        events.step()
    return done


def test_transfers_share_ports_equally() -> None:
    link = LinkSpec(bytes_per_s=100.0, latency_s=0.5)
    assert _arrivals(link, [(0.0, "a", "b", 200)]) == [pytest.approx(2.5)]
    # Two transfers from one port get half each until the shorter one is done.
    assert _arrivals(link, [(0.0, "a", "b", 100), (0.0, "a", "c", 200)]) == pytest.approx([2.5, 3.5])
    # The two directions of a port are independent.
    assert _arrivals(link, [(0.0, "a", "b", 100), (0.0, "b", "a", 100)]) == pytest.approx([1.5, 1.5])
    # A transfer that joins half-way.
    assert _arrivals(link, [(0.0, "a", "b", 100), (0.5, "c", "b", 100)]) == pytest.approx([2.0, 2.5])
    assert _arrivals(link, [(0.0, "a", "b", 0)]) == pytest.approx([0.5])


def test_a_limited_fabric_is_shared_by_all() -> None:
    link = LinkSpec(bytes_per_s=100.0, latency_s=0.0, fabric_bytes_per_s=100.0)
    assert _arrivals(link, [(0.0, "a", "b", 100), (0.0, "c", "d", 100)]) == pytest.approx([2.0, 2.0])


class Skewed:
    """Attention is twice and the whole step three times as slow if lengths differ."""

    def attention_factor(self, lengths: NDArray[np.int64]) -> float:
        return 2.0 if lengths.max() > lengths.min() else 1.0

    def step_factor(self, lengths: NDArray[np.int64]) -> float:
        return 3.0 if lengths.max() > lengths.min() else 1.0


def test_a_penalty_slows_batches_of_unequal_lengths() -> None:
    def last_s(prompts: tuple[int, int], penalty: Skewed | None) -> float:
        spec = ClusterSpec.uniform(1, PROFILE, penalty=penalty)
        requests = [SimRequest(f"r{n}", 0.0, prompt, 0, 101) for n, prompt in enumerate(prompts)]
        records = simulate(spec, requests, RoundRobin(), Fcfs()).requests
        assert records[0].tpot_s is not None
        return records[0].tpot_s

    assert last_s((100, 100), Skewed()) == pytest.approx(last_s((100, 100), None))
    kv_tokens = np.mean([2 * n + 400 + 2 for n in range(100)])
    slow = 3.0 * (7.0 + 0.2 + 2.0 * 0.003 * kv_tokens) / 1e3
    assert last_s((300, 100), Skewed()) == pytest.approx(slow, rel=1e-3)


@given(
    runs=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.1, 0.7, 2.5]),
            st.sampled_from([0.01, 0.07, 0.3, 1.3]),
            st.sampled_from([0.0, 1e-4, 1e-3]),
            st.integers(1, 60),
            st.integers(0, 4),
        ),
        min_size=1,
        max_size=8,
    ),
    share=st.floats(0.0, 1.0),
    later_s=st.sampled_from([0.0, 0.4, 1.0, 3.0]),
)
def test_recent_intervals_equal_those_of_single_steps(
    runs: list[tuple[float, float, float, int, int]], share: float, later_s: float
) -> None:
    """Runs follow pauses; the last one is in progress or already over. Queries have no side effect."""
    recent = StepRunIntervals()
    ended_s = 0.0
    tokens: list[tuple[float, float, int]] = []
    for number, (pause_s, first_s, increment_s, steps, requests) in enumerate(runs):
        start_s = ended_s + pause_s
        last = number == len(runs) - 1
        if last:
            steps = round(steps * share)
        ended_s = start_s + elapsed(first_s, increment_s, steps)
        run = StepRun(start_s, first_s, increment_s, steps)
        tokens += [
            (start_s + elapsed(first_s, increment_s, k + 1), first_s + increment_s * k, requests)
            for k in range(steps)
        ]
        if not last:
            recent.add(run, steps, requests)
    now_s = ended_s + later_s
    since_s = int(now_s) - 1.0
    # A step that ends exactly on a second may count on either side.
    assume(all(abs(end_s - round(end_s)) > 1e-6 for end_s, _, _ in tokens))
    seen = [(length_s * n, n) for end_s, length_s, n in tokens if end_s > since_s]
    count = sum(n for _, n in seen)
    expected = sum(s for s, _ in seen) / count if count else 0.0
    for _ in range(2):
        assert recent.mean_s(now_s, run, steps, requests) == pytest.approx(expected, rel=1e-6)
