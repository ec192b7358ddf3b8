"""Bid-ask in the simulator: requests have one owner, every offer ends, and runs are reproducible."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.bidding import Bidding
from simulator.cluster import ClusterSpec, LinkSpec, MigrationSpec, ReportSpec
from simulator.events import NEVER
from simulator.instance import Instance
from simulator.records import MigrationOutcome, SimResult
from simulator.request import SimRequest
from simulator.simulation import simulate
from tailrace.actions import Action, Offer, Place, Placement, WhenFull
from tailrace.cluster import Arrival, ClusterView, InstanceView, RequestView, Stage
from tailrace.handover import TRANSFERS
from tailrace.intra.orders import Fcfs
from tailrace.policy.base import Policy
from tailrace.policy.least_loaded import LeastLoaded
from tests.simulator.moving import MoveEverything
from tests.simulator.worlds import INTRA, PROFILE, Watched, assert_empty, recount, workloads


class OfferEverything(MoveEverything):
    """Offer every request to all other instances at every decision point."""

    summary = "offers every request at every decision point"

    def __init__(self, most_tokens: int | None = None) -> None:
        self.most_tokens = most_tokens

    def _move(self, view: ClusterView, request: RequestView, reason: str, by: int) -> Sequence[Action]:
        others = tuple(name for name in view.instances if name != request.instance_id)
        return (Offer(request.request_id, request.instance_id, others, reason, self.most_tokens),)


def spec_of(kv_tokens: int, interval_s: float = 0.0517, count: int = 4) -> ClusterSpec:
    spec = ClusterSpec.uniform(
        count,
        PROFILE,
        kv_capacity_tokens=kv_tokens,
        block_tokens=8,
        host_kv_bytes=400 * PROFILE.kv_bytes_per_token,
        max_num_seqs=6,
        chunk_budget_tokens=64,
    )
    return replace(
        spec,
        link=LinkSpec(bytes_per_s=1e9, latency_s=0.00037),
        migration=MigrationSpec(
            when_full=WhenFull.REFUSE,
            open_s=math.pi / 1e3,
            commit_s=math.sqrt(2) / 1e3,
            message_s=math.e / 1e3,
        ),
        report=ReportSpec(interval_s=interval_s, delay_s=0.0021),
        stages=(Stage(0, 60, ("i000", "i001")), Stage(60, 1 << 20, ("i002", "i003"))),
    )


def run(spec: ClusterSpec, requests: list[SimRequest], intra: str, most: int) -> tuple[Watched, SimResult]:
    simulation = Watched(spec, requests, OfferEverything(), INTRA[intra], most)
    return simulation, simulation.run(None)


def check_bidding(bidding: Bidding) -> None:
    """Assert that each request is in at most one receiver's queue and that transfers are within limits."""
    parties = bidding._parties.values()
    won = Counter(request_id for party in parties for request_id in party.receiver.queue)
    live = {request_id: count for request_id, count in won.items() if request_id in bidding._offers}
    assert all(count == 1 for count in live.values()), won
    assert all(party.receiver.open_transfers <= TRANSFERS for party in parties)
    sending = Counter(
        migration.source.instance_id
        for job in bidding._jobs.values()
        if (migration := bidding._migrations.find(job)) is not None and migration.on_closed is not None
    )
    assert all(count <= TRANSFERS for count in sending.values())


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    requests=workloads(most=12, span_s=1.0),
    intra=st.sampled_from(sorted(INTRA)),
    kv_tokens=st.sampled_from([330, 900]),
    interval_s=st.sampled_from([0.0, 0.0517]),
)
def test_each_request_has_one_receiver_and_all_offers_end(
    requests: list[SimRequest], intra: str, kv_tokens: int, interval_s: float
) -> None:
    spec = spec_of(kv_tokens, interval_s)
    with pytest.MonkeyPatch.context() as patch:
        begin, take = Instance._plan_run, Bidding._deliver

        def checked(instance: Instance, now: float) -> None:
            begin(instance, now)
            recount(instance)

        def watched(bidding: Bidding, *message: object) -> None:
            take(bidding, *message)  # type: ignore[arg-type]
            check_bidding(bidding)

        patch.setattr(Instance, "_plan_run", checked)
        patch.setattr(Bidding, "_deliver", watched)
        jumping, result = run(spec, requests, intra, NEVER)
        stepping, expected = run(spec, requests, intra, 1)
    for record, other in zip(result.requests, expected.requests, strict=True):
        times = jumping.token_times[record.request_id]
        assert len(times) == record.output_tokens
        assert (np.diff(times) > 0).all()
        assert [p.instance_id for p in record.placements] == [p.instance_id for p in other.placements]
    assert jumping.bidding.outcomes == stepping.bidding.outcomes
    bidding = jumping.bidding
    # Deliver messages that are in flight when the last request finishes.
    while jumping._events.foreground:
        jumping._events.step()
    assert not bidding._offers and not any(party.receiver.queue for party in bidding._parties.values())
    assert not any(job.on_offer for job in jumping.jobs)
    assert all(not party.sender.buffered for party in bidding._parties.values())
    committed = sum(m.outcome is MigrationOutcome.COMMITTED for m in result.migrations)
    assert committed == sum(record.migrations for record in result.requests)
    # The sender of the very last one may not be informed yet.
    assert bidding.outcomes["taken"] <= committed
    for instance in jumping.instances:
        assert_empty(instance)


def test_runs_depend_only_on_the_seed() -> None:
    requests = [SimRequest(f"r{n}", n * 0.02, 20 + n * 37 % 80, 0, 40 + n * 53 % 90) for n in range(60)]
    spec = replace(spec_of(900), report=ReportSpec(0.0))

    def taken(seed: int) -> list[tuple[str, str, float]]:
        found = simulate(spec, requests, OfferEverything(), Fcfs(), seed=seed).migrations
        return [(m.request_id, m.target_id, m.end_s) for m in found]

    assert taken(1) == taken(1)
    # Views are exact, so only message times differ.
    assert taken(1) != taken(2)


class OfferOnce(Policy):
    """Place everything on i000 and offer it to the others after prefill."""

    def __init__(self, most_tokens: int | None = None) -> None:
        self.most_tokens = most_tokens
        self.seen: list[InstanceView] = []

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        self.seen.append(view.instances["i000"])
        list(self.seen[-1].requests)
        return Place("i000")

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> list[Action]:
        others = tuple(name for name in view.instances if name != "i000")
        return [Offer(request.request_id, request.instance_id, others, "test", self.most_tokens)]


def test_a_request_goes_to_a_lightly_loaded_receiver() -> None:
    """The more loaded half of the bidders is excluded."""
    requests = [SimRequest(f"r{n}", n * 1.0, 100, 0, 400) for n in range(3)]
    result = simulate(spec_of(4_000), requests, OfferOnce(), Fcfs())
    taken = [m.target_id for m in result.migrations]
    assert [m.outcome for m in result.migrations] == [MigrationOutcome.COMMITTED] * 3
    assert len(set(taken)) == 3 and "i000" not in taken
    assert all(m.source_id == "i000" and m.reason == "test" for m in result.migrations)


def test_a_receiver_beyond_the_load_limit_gets_nothing() -> None:
    requests = [SimRequest("r", 0.0, 100, 0, 50)]
    assert not simulate(spec_of(4_000), requests, OfferOnce(100), Fcfs()).migrations
    assert len(simulate(spec_of(4_000), requests, OfferOnce(200), Fcfs()).migrations) == 1


def test_without_room_an_offered_request_stays() -> None:
    requests = [SimRequest("r", 0.0, 300, 0, 20)]
    spec = spec_of(400)
    small = tuple(
        replace(i, kv_capacity_tokens=400 if i.instance_id == "i000" else 200) for i in spec.instances
    )
    simulation = Watched(replace(spec, instances=small), requests, OfferOnce(), INTRA["fcfs"])
    result = simulation.run(None)
    assert not result.migrations and result.requests[0].migrations == 0
    assert simulation.bidding.outcomes == {"kept": 1}


def test_an_offered_request_counts_as_migrating() -> None:
    """With slow messages, the second request arrives while the first is on offer."""
    spec = spec_of(4_000, interval_s=0.0)
    spec = replace(spec, migration=replace(spec.migration, message_s=1.0))
    policy = OfferOnce()
    simulate(spec, [SimRequest("a", 0.0, 50, 0, 300), SimRequest("b", 0.3, 50, 0, 300)], policy, Fcfs())
    assert policy.seen[1].migrations_out == 1
    assert [r.migrating for r in policy.seen[1].requests] == [True]


def test_an_unknown_receiver_is_an_error() -> None:
    class Lost(LeastLoaded):
        def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> list[Action]:
            return [Offer(request.request_id, request.instance_id, ("nobody",), "test")]

    with pytest.raises(Exception, match="nobody"):
        simulate(spec_of(900), [SimRequest("r", 0.0, 50, 0, 20)], Lost(), Fcfs())
