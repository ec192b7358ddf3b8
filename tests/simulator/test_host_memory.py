"""Host memory as a second tier: one pool for swapped requests and evicted KV, at the link's speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from simulator.cluster import ClusterSpec, LinkSpec
from simulator.host_memory import HostMemory
from simulator.records import RequestRecord, SimResult
from simulator.request import SimRequest
from simulator.setups import setup_for
from simulator.simulation import Simulation, simulate
from simulator.workloads.generators import SESSIONS
from tailrace.actions import Place, Placement
from tailrace.cache.index import Tier
from tailrace.cluster import Arrival, CachedTokens, ClusterView
from tailrace.intra.orders import Fcfs
from tailrace.policy.base import Policy
from tailrace.policy.deployment import Deployment
from tailrace.policy.least_loaded import LeastLoaded
from tailrace.profiles import SwapModel, load_profile
from tailrace.slo import Slo
from tests.simulator.worlds import INTRA, Watched, recount

PROFILE = load_profile("llama-3.1-8b-h100")
UNIT = 64
UNIT_BYTES = UNIT * PROFILE.kv_bytes_per_token


def request(name: str, at_s: float, units: Sequence[int], rest: int = 8, answer: int = 20) -> SimRequest:
    """Return a request whose prompt consists of these units and `rest` more tokens."""
    return SimRequest(name, at_s, len(units) * UNIT + rest, 0, answer, tuple(units), UNIT)


def cluster(instances: int = 1, host_units: int = 1_000, **limits: object) -> ClusterSpec:
    return ClusterSpec.uniform(
        instances,
        PROFILE,
        **{
            "prefix_caching": True,
            "host_caching": True,
            "host_kv_bytes": host_units * UNIT_BYTES,
            "kv_capacity_tokens": 70 * UNIT,
            **limits,
        },
    )


def run(
    requests: Sequence[SimRequest], policy: Policy, spec: ClusterSpec
) -> tuple[Simulation, dict[str, RequestRecord]]:
    simulation = Simulation(spec, requests, policy, Fcfs(), seed=0, sample_interval_s=None)
    return simulation, {record.request_id: record for record in simulation.run(None).requests}


# ---- the pool


class HostMemoryMachine(RuleBasedStateMachine):
    """Compare the pool with a list of names in least recently used order."""

    def __init__(self) -> None:
        super().__init__()
        self.host = HostMemory(20, 3)
        self.swapped = 0
        self.kept: list[int] = []
        self.reported: set[int] = set()

    @rule(blocks=st.integers(0, 22))
    def reserve(self, blocks: int) -> None:
        """Swapped requests take precedence and can use the whole pool."""
        fits = self.swapped + blocks <= 20
        assert self.host.reserve(blocks) == fits
        if fits:
            self.swapped += blocks
            self._fit()

    @rule(share=st.floats(0.0, 1.0))
    def give_back(self, share: float) -> None:
        blocks = round(self.swapped * share)
        self.host.release(blocks)
        self.swapped -= blocks

    @rule(names=st.lists(st.integers(0, 12), max_size=9, unique=True))
    def keep(self, names: list[int]) -> None:
        copied = 0
        if 20 - self.swapped >= 3:
            for name in names:
                copied += 3 * (name not in self.kept)
                self.kept = [*(kept for kept in self.kept if kept != name), name]
                self._fit()
        assert self.host.store(names) == copied

    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        if self.kept:
            name = data.draw(st.sampled_from(self.kept))
            self.host.touch([name])
            self.kept = [*(kept for kept in self.kept if kept != name), name]

    @rule()
    def report(self) -> None:
        """The reported changes add up to the present content."""
        stored, removed = self.host.changes.take()
        self.reported = (self.reported | set(stored)) - set(removed)
        assert self.reported == set(self.kept)

    @invariant()
    def adds_up(self) -> None:
        assert self.host.swapped_blocks == self.swapped
        assert self.host.cached_blocks == 3 * len(self.kept)
        assert self.host.swapped_blocks + self.host.cached_blocks <= 20
        assert [name for name in range(13) if name in self.host] == sorted(self.kept)

    def _fit(self) -> None:
        while self.swapped + 3 * len(self.kept) > 20:
            self.kept.pop(0)


TestHostMemory = HostMemoryMachine.TestCase


def test_entries_that_do_not_fit_are_not_kept() -> None:
    assert HostMemory(100).store([1, 2]) == 0
    assert HostMemory(2, 3).store([1, 2]) == 0
    full = HostMemory(10, 3)
    assert full.reserve(8)
    assert full.store([1]) == 0 and 1 not in full


# ---- an instance


def evicting_sequence(first: int = 60, between: int = 65) -> list[SimRequest]:
    """Return the same prompt twice, and between the two another one that evicts it."""
    units, others = list(range(first)), list(range(1_000, 1_000 + between))
    return [request("first", 0.0, units), request("other", 10.0, others), request("again", 20.0, units)]


def test_evicted_kv_is_loaded_at_the_speed_of_the_host_link() -> None:
    simulation, records = run(evicting_sequence(), LeastLoaded(), cluster())
    again = records["again"]
    assert again.cached_tokens == 60 * UNIT and 50 * UNIT < again.loaded_tokens <= 60 * UNIT
    _, computed = run(evicting_sequence(), LeastLoaded(), cluster(host_caching=False))
    assert computed["again"].cached_tokens < 10 * UNIT and computed["again"].loaded_tokens == 0
    # It waits for its own copy and for that of the evicted blocks.
    free = msgspec.structs.replace(PROFILE, swap=SwapModel(base_ms=0.0, bytes_per_s=1e30))
    spec = cluster()
    free_spec = replace(spec, instances=tuple(replace(i, profile=free) for i in spec.instances))
    _, at_once = run(evicting_sequence(), LeastLoaded(), free_spec)
    waited_s = (again.ttft_s or 0.0) - (at_once["again"].ttft_s or 0.0)
    loaded_s = PROFILE.swap.ms(again.loaded_tokens * PROFILE.kv_bytes_per_token) / 1e3
    assert loaded_s < waited_s < 2.5 * loaded_s
    assert (again.ttft_s or 0.0) < (computed["again"].ttft_s or 0.0) / 2
    (instance,) = simulation.instances
    assert instance.swap_s >= waited_s


def test_kv_in_host_memory_is_not_copied_out_again() -> None:
    """Loaded blocks remain in host memory."""
    units, others = list(range(60)), list(range(1_000, 1_065))
    requests = [request(f"r{n}", 10.0 * n, others if n % 2 else units, rest=1, answer=1) for n in range(8)]
    simulation, records = run(requests, LeastLoaded(), cluster())
    (instance,) = simulation.instances
    # At most, both prompts are copied out once, and in as often as they are loaded.
    base_s = PROFILE.swap.base_ms / 1e3
    moved = sum(record.loaded_tokens for record in records.values()) + 125 * UNIT
    most_s = moved * PROFILE.kv_bytes_per_token / PROFILE.swap.bytes_per_s + 40 * base_s
    assert 0.0 < instance.swap_s <= most_s
    assert [records[f"r{n}"].cached_tokens for n in (2, 3, 4)] == [60 * UNIT, 65 * UNIT, 60 * UNIT]


def test_kv_that_is_faster_to_compute_is_not_loaded() -> None:
    slow = msgspec.structs.replace(PROFILE, swap=SwapModel(base_ms=1.0, bytes_per_s=1e9))
    spec = cluster()
    spec = replace(spec, instances=tuple(replace(i, profile=slow) for i in spec.instances))
    _, records = run(evicting_sequence(), LeastLoaded(), spec)
    assert records["again"].loaded_tokens == 0 and records["again"].cached_tokens < 10 * UNIT


def test_kv_evicted_from_host_memory_is_recomputed() -> None:
    """The last of 60 units are evicted first; host memory has room for the 20 evicted last."""
    _, records = run(evicting_sequence(), LeastLoaded(), cluster(host_units=20))
    again = records["again"]
    assert 0 < again.loaded_tokens <= 20 * UNIT
    assert again.loaded_tokens <= again.cached_tokens < 30 * UNIT


def test_the_index_covers_both_tiers() -> None:
    seen: list[CachedTokens] = []

    class RecordCached(LeastLoaded):
        def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
            seen.append(arrival.held_on("i000"))
            return super().place(view, arrival, now)

    simulation, _ = run(evicting_sequence(), RecordCached(), cluster())
    assert seen[0] == CachedTokens(0, 0)
    device, total, reported = seen[2]
    assert device < 10 * UNIT and total == reported == 60 * UNIT
    index = simulation._prefixes._index
    simulation._prefixes.held([0], UNIT, 99.0)
    (instance,) = simulation.instances
    host = index.names("i000", Tier.HOST)
    assert host and all(name in instance.host for name in host)
    assert len(host) * UNIT // instance.block_tokens == instance.host.cached_blocks


class Elsewhere(Policy):
    """Place the repeated prompt on the second instance, which pulls from the first."""

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        if arrival.request_id != "again":
            return Place("i000")
        return Place("i001", pull_from="i000" if arrival.reported_tokens("i000") else "")


def test_another_instance_can_pull_from_host_memory() -> None:
    link = LinkSpec(bytes_per_s=1e9)
    simulation, records = run(evicting_sequence(), Elsewhere(), replace(cluster(2), link=link))
    (pull,) = simulation.pulls.records
    assert pull.tokens == 60 * UNIT and pull.end_s - pull.requested_s >= pull.bytes_sent / link.bytes_per_s
    assert records["again"].cached_tokens == 60 * UNIT and records["again"].loaded_tokens == 0


def test_swapped_requests_displace_cached_kv() -> None:
    """Requests can be swapped out although host memory is full of evicted KV."""
    old = [request(f"old{n}", 0.2 * n, range(1_000 * n, 1_000 * n + 40), answer=4) for n in range(1, 9)]
    many = [request(f"r{n}", 20.0, range(9_000 + 100 * n, 9_012 + 100 * n), answer=1_500) for n in range(4)]
    spec = cluster(host_units=120)
    simulation, records = run([*old, *many], LeastLoaded(), spec)
    assert sum(record.preemptions_swapped for record in records.values()) > 0
    assert sum(record.preemptions_recomputed for record in records.values()) == 0
    (instance,) = simulation.instances
    assert instance.host_blocks == 0


# ---- accounting


@st.composite
def workloads(draw: st.DrawFn) -> list[SimRequest]:
    """Draw sessions that branch and return, some of them exceeding the memory."""
    requests: list[SimRequest] = []
    for n in range(draw(st.integers(1, 16))):
        stem = draw(st.integers(0, 3))
        units = [100 * stem + k for k in range(draw(st.integers(0, 6)))]
        units += [10_000 * (n + 1) + k for k in range(draw(st.integers(0, 3)))]
        at_s = draw(st.integers(0, 800)) / 1_000 + np.pi * (n + 1) / 1e5
        rest, answer = draw(st.integers(1, 63)), draw(st.integers(1, 90))
        requests.append(request(f"r{n}", at_s, units, rest=rest, answer=answer))
    return requests


class Recounted(Watched):
    """Recount both tiers whenever an instance begins a run."""

    def check(self) -> None:
        for instance in self.instances:
            recount(instance)
            host = instance.host
            assert host.swapped_blocks + host.cached_blocks <= max(host.total_blocks, host.swapped_blocks)
            assert host.swapped_blocks <= host.total_blocks
            waiting = [job for _, job in instance.waiting]
            assert host.swapped_blocks == sum(job.blocks for job in waiting if job.state.value == "swapped")
            assert host.cached_blocks == len(host._cached) * host._unit


@given(
    workloads(), st.sampled_from([8, 12, 40]), st.sampled_from([0, 3, 10, 200]), st.sampled_from([1, 9_999])
)
@settings(max_examples=60, deadline=None)
def test_both_tiers_are_accounted_for_exactly(
    requests: list[SimRequest], units: int, host_units: int, max_steps: int
) -> None:
    """This holds at each run and at the end, also when simulating every step."""
    spec = cluster(2, host_units, kv_capacity_tokens=units * UNIT)
    simulation = Recounted(spec, requests, LeastLoaded(), Fcfs(), max_steps)
    result = simulation.run(None)
    for record in result.requests:
        assert record.refused or record.finish_s is not None
        assert record.loaded_tokens <= record.cached_tokens < record.prompt_tokens
    simulation.check()
    for instance in simulation.instances:
        cache = instance.cache
        assert instance.is_empty
        if cache is not None:
            assert cache.shared == 0 and not cache._references
            assert sum(cache._free.values()) == cache._free_blocks <= instance.total_blocks
        assert instance.host.cached_blocks <= instance.host.total_blocks


@pytest.mark.parametrize("intra", ["fcfs", "decode_first", "pascal", "earliest_due"])
@given(workloads(), st.sampled_from([8, 12, 40]), st.sampled_from([3, 10, 200]))
@settings(max_examples=15, deadline=None)
def test_runs_of_steps_equal_single_steps(
    intra: str, requests: list[SimRequest], units: int, host_units: int
) -> None:
    """A run of steps ends at an eviction that needs a copy."""
    spec = cluster(1, host_units, kv_capacity_tokens=units * UNIT)
    jumping = Watched(spec, requests, LeastLoaded(), INTRA[intra])
    stepping = Watched(spec, requests, LeastLoaded(), INTRA[intra], 1)
    found, expected = jumping.run(None).requests, stepping.run(None).requests
    for record, other in zip(found, expected, strict=True):
        assert (record.cached_tokens, record.loaded_tokens) == (other.cached_tokens, other.loaded_tokens)
        if not record.refused:
            name = record.request_id
            np.testing.assert_allclose(
                jumping.token_times[name], stepping.token_times[name], rtol=0, atol=1e-9
            )


# ---- without it


def simulated(policy: str, workload: str, **limits: object) -> SimResult:
    setup = setup_for(policy)
    if policy not in ("tailrace", "least_loaded"):
        setup = setup.with_parameters({"pulls": True})
    spec = setup.apply(
        ClusterSpec.uniform(2, PROFILE, **{"prefix_caching": True, "kv_capacity_tokens": 60_000, **limits})
    )
    deployment = Deployment(Slo(5.0, 0.1), PROFILE)
    requests = SESSIONS[workload].requests(60, 6.0, 1)
    return simulate(spec, requests, setup.policy(deployment), setup.intra(deployment.slo), seed=1)


WORKLOADS = ("agent_sessions", "document_sessions")
POLICIES = ("tailrace", "prefix_affinity", "pascal", "least_loaded")


# Every second case runs only in make soak; the others cover each policy and each workload.
@pytest.mark.parametrize(
    ("policy", "workload"),
    [
        pytest.param(policy, workload, marks=pytest.mark.slow if (row + column) % 2 else ())
        for row, policy in enumerate(POLICIES)
        for column, workload in enumerate(WORKLOADS)
    ],
)
def test_without_host_memory_the_tier_changes_nothing(policy: str, workload: str) -> None:
    without = simulated(policy, workload, host_kv_bytes=0)
    with_tier = simulated(policy, workload, host_kv_bytes=0, host_caching=True)
    assert with_tier.requests == without.requests
    assert with_tier.migrations == without.migrations and with_tier.pulls == without.pulls
    assert (with_tier.events_processed, with_tier.end_s) == (without.events_processed, without.end_s)


@pytest.mark.parametrize("policy", ["tailrace", "prefix_affinity"])
def test_host_memory_increases_cache_hits_of_conversations(policy: str) -> None:
    without, with_tier = (
        simulated(policy, "document_sessions", host_caching=caching).requests for caching in (False, True)
    )
    assert sum(r.cached_tokens for r in with_tier) > sum(r.cached_tokens for r in without)
    assert sum(r.loaded_tokens for r in with_tier) > 0 == sum(r.loaded_tokens for r in without)
