"""Corrections between reports give the true counts, in any order of events."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tailrace.control.cluster_model import Corrections, CountedRequest, Pending


@dataclass
class Cluster:
    """The content of a report: requests, and reserved room by key."""

    held: dict[int, CountedRequest] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)

    @property
    def has_slot(self) -> int:
        """Return the number of requests with a slot."""
        return sum(request.has_slot for request in self.held.values())


class Machine(RuleBasedStateMachine):
    """An instance, its last report, and the corrections since.

    Room for a migration is reserved when it is opened, and included in reports from then on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.corrections: Corrections[int, Pending] = Corrections()
        self.now, self.reported = Cluster(), Cluster()
        self.pending: dict[int, int] = {}
        self.cached: dict[int, int] = {}
        # Open incoming migrations: the room that they reserve.
        self.coming: dict[int, int] = {}
        self.next = 0

    def new(self) -> int:
        self.next += 1
        return self.next

    @rule(tokens=st.integers(1, 500), cached=st.integers(0, 100))
    def place(self, tokens: int, cached: int) -> None:
        key = self.new()
        self.pending[key], self.cached[key] = tokens, min(cached, tokens)
        self.corrections.add_pending(key, Pending(tokens, self.cached[key], float(key)))

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), generated=st.integers(0, 20), has_slot=st.booleans())
    def begin(self, data: st.DataObject, generated: int, has_slot: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.pending)))
        context = self.pending.pop(key) + generated
        assert self.corrections.remove_pending(key) is not None
        assert self.corrections.remove_pending(key) is None
        self.now.held[key] = CountedRequest(context, context, has_slot)
        self.corrections.add_request(key, self.now.held[key])

    @precondition(lambda self: self.now.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.now.held)))
        self.corrections.remove_request(self.now.held.pop(key))

    @precondition(lambda self: self.now.held)
    @rule(data=st.data(), generated=st.integers(0, 20), has_slot=st.booleans())
    def change(self, data: st.DataObject, generated: int, has_slot: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.now.held)))
        before = self.now.held[key]
        after = self.now.held[key] = CountedRequest(
            before.context_tokens + generated, before.kv_tokens, has_slot
        )
        self.corrections.change_request(before, after)

    @rule(tokens=st.integers(1, 500))
    def open_migration(self, tokens: int) -> None:
        key = self.new()
        self.coming[key] = self.now.reserved[key] = tokens
        self.corrections.open_arrival(key, tokens, tokens)

    @precondition(lambda self: self.now.reserved)
    @rule(data=st.data())
    def commit_migration(self, data: st.DataObject) -> None:
        """The request begins here; its migration is closed later."""
        key = data.draw(st.sampled_from(sorted(self.now.reserved)))
        tokens = self.now.reserved.pop(key)
        self.now.held[key] = CountedRequest(tokens, tokens, has_slot=True)
        self.corrections.add_request(key, self.now.held[key])

    @precondition(lambda self: self.coming)
    @rule(data=st.data())
    def close_migration(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.coming)))
        tokens = self.coming.pop(key)
        aborted = self.now.reserved.pop(key, None) is not None
        if aborted and key in self.reported.reserved:
            # The report includes room that is free again; the next report corrects this.
            self.corrections.kv_change -= tokens
        self.corrections.close_migration(key)

    @rule()
    def report(self) -> None:
        self.reported = Cluster(dict(self.now.held), dict(self.now.reserved))
        self.corrections.reset_changes()
        for key in self.corrections.coming:
            self.corrections.coming[key] = 0

    @invariant()
    def counts_equal_the_true_state(self) -> None:
        reported = self.reported
        counts = self.corrections.counts(
            reported.has_slot,
            len(reported.held) - reported.has_slot,
            sum(request.context_tokens for request in reported.held.values()),
            sum(request.kv_tokens for request in reported.held.values()) + sum(reported.reserved.values()),
        )
        pending = sum(self.pending.values())
        assert counts == (
            self.now.has_slot,
            len(self.now.held) - self.now.has_slot + len(self.pending),
            sum(request.context_tokens for request in self.now.held.values()) + pending,
            sum(request.kv_tokens for request in self.now.held.values()) + sum(self.now.reserved.values()),
        )
        assert self.corrections.pending_tokens == pending
        assert self.corrections.pending_cached_tokens == sum(self.cached[key] for key in self.pending)
        assert self.corrections.coming_context == self.coming


TestCorrections = Machine.TestCase
TestCorrections.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_counts_are_never_negative() -> None:
    """A finished request can be reported again after a report that already excludes it."""
    corrections: Corrections[str, Pending] = Corrections()
    corrections.remove_request(CountedRequest(10, 16, has_slot=True))
    corrections.remove_request(CountedRequest(10, 16, has_slot=False))
    assert corrections.counts(0, 0, 0, 0) == (0, 0, 0, 0)


def test_each_count_is_bounded_separately() -> None:
    corrections: Corrections[str, Pending] = Corrections()
    corrections.remove_request(CountedRequest(10, 16, has_slot=True))
    assert corrections.counts(1, 1, 10, 16) == (0, 1, 0, 0)
    assert corrections.counts(2, 1, 11, 17) == (1, 1, 1, 1)
    corrections.add_pending("p", Pending(5, 2, 0.0))
    corrections.open_arrival("m", 32, 20)
    # A placed request waits, with its context; an incoming migration reserves KV.
    assert corrections.counts(1, 1, 10, 16) == (0, 2, 5, 32)


def test_a_report_keeps_pending_placements_and_migrations() -> None:
    corrections: Corrections[str, Pending] = Corrections()
    corrections.add_pending("p", Pending(5, 2, 0.0))
    corrections.open_arrival("in", 32, 20)
    corrections.open_departure("out")
    corrections.add_request("r", CountedRequest(7, 16, has_slot=False))
    corrections.reset_changes()
    assert (corrections.pending_tokens, corrections.pending_cached_tokens) == (5, 2)
    assert (corrections.coming, corrections.coming_context, corrections.leaving) == (
        {"in": 32},
        {"in": 20},
        {"out"},
    )
    assert corrections.counts(0, 0, 0, 0) == (0, 1, 5, 32)
    for key in ("in", "out", "unknown"):
        corrections.close_migration(key)
    assert (corrections.coming, corrections.coming_context, corrections.leaving) == ({}, {}, set())
