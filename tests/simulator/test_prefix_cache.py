"""The simulated prefix cache stays within memory, and hits are what was computed before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.cluster import ClusterSpec, LinkSpec
from simulator.prefix_cache import PrefixCache
from simulator.records import RequestRecord
from simulator.request import SimRequest
from simulator.setups import setup_for
from simulator.simulation import Simulation
from simulator.workloads.generators import SESSIONS
from tailrace.actions import Place, Placement
from tailrace.cluster import Arrival, ClusterView
from tailrace.intra.orders import Fcfs
from tailrace.policy.base import Policy
from tailrace.policy.deployment import Deployment
from tailrace.policy.least_loaded import LeastLoaded
from tailrace.policy.prefix_affinity import PrefixAffinity
from tailrace.policy.session import Session
from tailrace.policy.tailrace.policy import Tailrace
from tailrace.profiles import load_profile
from tailrace.slo import Slo

PROFILE = load_profile("llama-3.1-8b-h100")
UNIT = 64


def request(name: str, at_s: float, units: Sequence[int], rest: int = 8, answer: int = 20) -> SimRequest:
    """Return a request whose prompt consists of these units and `rest` more tokens."""
    return SimRequest(name, at_s, len(units) * UNIT + rest, 0, answer, tuple(units), UNIT)


def run(
    requests: Sequence[SimRequest],
    policy: Policy,
    instances: int = 1,
    link: LinkSpec | None = None,
    **limits: object,
) -> tuple[Simulation, dict[str, RequestRecord]]:
    spec = ClusterSpec.uniform(instances, PROFILE, **{"prefix_caching": True, **limits})
    if link is not None:
        spec = replace(spec, link=link)
    simulation = Simulation(spec, requests, policy, Fcfs(), seed=0, sample_interval_s=None)
    return simulation, {record.request_id: record for record in simulation.run(None).requests}


def test_a_cached_prefix_is_found_and_shortens_prefill() -> None:
    units = list(range(60))
    first, again = request("first", 0.0, units), request("again", 10.0, units)
    other = request("other", 20.0, [n + 1_000 for n in units])
    _, records = run([first, again, other], LeastLoaded())
    assert [records[name].cached_tokens for name in ("first", "again", "other")] == [0, 60 * UNIT, 0]
    ttft = {name: record.ttft_s or 0.0 for name, record in records.items()}
    assert ttft["again"] < ttft["first"] / 4
    assert ttft["other"] == pytest.approx(ttft["first"])


def test_the_last_token_is_always_computed() -> None:
    whole = [request("a", 0.0, range(4), rest=0), request("b", 10.0, range(4), rest=0)]
    _, records = run(whole, LeastLoaded())
    assert records["b"].cached_tokens == 3 * UNIT


def test_units_after_a_difference_are_not_found() -> None:
    _, records = run([request("a", 0.0, [1, 2, 3, 4]), request("b", 9.0, [1, 2, 9, 4])], LeastLoaded())
    assert records["b"].cached_tokens == 2 * UNIT


def test_eviction_starts_with_the_end_of_the_oldest_released_prompt() -> None:
    """There is room for ten units: `new` evicts the end of `old` and leaves its first two units."""
    old, new = request("old", 0.0, range(5), answer=8), request("new", 5.0, range(100, 107), answer=8)
    back = request("back", 10.0, range(5), answer=8)
    _, records = run([old, new, back], LeastLoaded(), kv_capacity_tokens=10 * UNIT)
    assert 0 < records["back"].cached_tokens < 5 * UNIT


class Elsewhere(Policy):
    """Place the first request on the first instance, all others on the second, which pulls from the first."""

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        if arrival.request_id == "first":
            return Place("i000")
        return Place("i001", pull_from="i000" if arrival.reported_tokens("i000") else "")


def test_a_prefix_is_pulled_at_the_speed_of_the_link() -> None:
    units = list(range(60))
    first, again = request("first", 0.0, units), request("again", 10.0, [*units, 1_000])
    link = LinkSpec(bytes_per_s=1e9)
    simulation, records = run([first, again], Elsewhere(), 2, link=link)
    assert records["again"].cached_tokens == 60 * UNIT
    (pull,) = simulation.pulls.records
    assert (pull.source_id, pull.target_id, pull.tokens, pull.requests) == ("i000", "i001", 60 * UNIT, 1)
    assert pull.bytes_sent == 60 * UNIT * PROFILE.kv_bytes_per_token
    took_s = pull.end_s - pull.requested_s
    assert took_s >= pull.bytes_sent / link.bytes_per_s
    assert records["again"].queue_s == pytest.approx(took_s, abs=1e-6)


def test_requests_with_the_same_missing_prefix_share_one_pull() -> None:
    units = list(range(60))
    many = [request(f"r{n}", 10.0, [*units, 1_000 + n]) for n in range(5)]
    simulation, records = run([request("first", 0.0, units), *many], Elsewhere(), 2)
    assert [records[f"r{n}"].cached_tokens for n in range(5)] == [60 * UNIT] * 5
    (pull,) = simulation.pulls.records
    assert pull.requests == 5


def test_a_prefix_evicted_before_the_pull_is_computed() -> None:
    """The holder has evicted the prefix when the pull starts."""
    units = list(range(10))
    first, again = request("first", 0.0, units, answer=8), request("again", 10.0, units)

    class EvictBeforePull(Elsewhere):
        def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
            holder = simulation.instances[0].cache
            if arrival.request_id == "again" and holder is not None:
                holder.shrink(0)
            return super().place(view, arrival, now)

    spec = ClusterSpec.uniform(2, PROFILE, prefix_caching=True)
    simulation = Simulation(spec, [first, again], EvictBeforePull(), Fcfs(), seed=0, sample_interval_s=None)
    records = {record.request_id: record for record in simulation.run(None).requests}
    assert [pull.tokens for pull in simulation.pulls.records] == [0]
    assert records["again"].cached_tokens == 0 and records["again"].finish_s is not None


@pytest.mark.parametrize("policy", ["pascal", "tailrace"])
def test_preemption_frees_only_unshared_blocks(policy: str) -> None:
    """Blocks that other requests share are not freed; the batch is limited to what fits."""
    requests = SESSIONS["agent_sessions"].requests(100, 8.0, 1)
    setup = setup_for(policy)
    limits = {"prefix_caching": True, "kv_capacity_tokens": 40_000, "host_kv_bytes": 0}
    spec = setup.apply(ClusterSpec.uniform(1, PROFILE, **limits))
    deployment = Deployment(Slo(5.0, 0.1), PROFILE)
    intra = setup.intra(deployment.slo)
    simulation = Simulation(spec, requests, setup.policy(deployment), intra, seed=0, sample_interval_s=None)
    (instance,) = simulation.instances
    begin = instance._plan_run

    def checked(now: float) -> None:
        begin(now)
        assert instance.used_blocks_at(instance.boundary) <= instance.total_blocks
        assert instance._run.steps >= 0

    instance._plan_run = checked  # type: ignore[method-assign]
    records = simulation.run(None).requests
    assert len(records) == 100 and all(record.finish_s is not None for record in records)
    assert sum(r.preemptions_swapped + r.preemptions_recomputed for r in records) > 0


def test_without_unit_names_or_prefix_caching_nothing_is_cached() -> None:
    plain = [SimRequest(f"r{n}", 0.1 * n, 500, 0, 30) for n in range(20)]
    named = [request(f"r{n}", 0.1 * n, range(7)) for n in range(20)]
    for requests, caching in ((plain, True), (named, False)):
        simulation, records = run(requests, LeastLoaded(), prefix_caching=caching)
        assert all(instance.cache is None for instance in simulation.instances)
        assert all(record.cached_tokens == 0 for record in records.values())


@pytest.mark.parametrize("policy", [PrefixAffinity(), Session(), Tailrace()], ids=lambda p: type(p).__name__)
def test_conversations_are_placed_on_the_holder_of_their_prefix(policy: Policy) -> None:
    turns = [
        request(f"{talk}-{turn}", 2.0 * turn + 0.05 * talk, range(1_000 * talk, 1_000 * talk + 20 + 5 * turn))
        for turn in range(4)
        for talk in range(12)
    ]
    _, records = run(turns, policy, instances=4)
    for turn in range(1, 4):
        found = [records[f"{talk}-{turn}"].cached_tokens for talk in range(12)]
        assert sum(found) >= 0.9 * 12 * (15 + 5 * turn) * UNIT
    assert len({record.instance_id for record in records.values()}) > 1


@st.composite
def workloads(draw: st.DrawFn) -> list[SimRequest]:
    """Draw sessions that branch, some of them exceeding the memory."""
    count = draw(st.integers(1, 14))
    requests: list[SimRequest] = []
    for n in range(count):
        stem = draw(st.integers(0, 2))
        shared = draw(st.integers(0, 4))
        units = [100 * stem + k for k in range(shared)]
        units += [10_000 * (n + 1) + k for k in range(draw(st.integers(0, 3)))]
        at_s = draw(st.floats(0.0, 0.4))
        requests.append(
            request(f"r{n}", at_s, units, rest=draw(st.integers(1, 63)), answer=draw(st.integers(1, 60)))
        )
    return requests


@given(workloads(), st.sampled_from([8, 12, 40]), st.booleans())
@settings(max_examples=80, deadline=None)
def test_cached_blocks_are_accounted_for_exactly(requests: list[SimRequest], units: int, host: bool) -> None:
    """At the end no block is referenced, and all cached blocks fit."""
    simulation, records = run(
        requests,
        LeastLoaded(),
        instances=2,
        kv_capacity_tokens=units * UNIT,
        host_kv_bytes=1 << 30 if host else 0,
    )
    for record in records.values():
        assert record.refused or record.finish_s is not None
        assert record.cached_tokens < record.prompt_tokens
    for instance in simulation.instances:
        assert instance.is_empty
        cache = instance.cache
        if cache is not None:
            assert cache.shared == 0 and not cache._references
            assert sum(cache._free.values()) == cache._free_blocks <= instance.total_blocks


def test_the_eviction_order_is_that_of_vllm() -> None:
    """Blocks are released in reverse: the end of the first request, its beginning, then the second's end."""
    cache = PrefixCache(1)
    for name in (1, 2, 3, 11, 12):
        assert cache.add(name)
    cache.release([1, 2, 3], 1)
    cache.release([11, 12], 0)
    order: list[OrderedDict[int, int] | list[int]] = []
    for room in range(6, -1, -1):
        cache.shrink(room)
        order.append([name for name in (1, 2, 3, 11, 12) if name in cache])
    assert order == [[1, 2, 3, 11, 12], [1, 2, 3, 11, 12], [1, 2, 11, 12], [1, 11, 12], [11, 12], [11], []]
