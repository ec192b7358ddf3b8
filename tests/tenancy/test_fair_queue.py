"""Fair queue: shares by weight within one largest request, no starvation, bounded queues per tenant."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tailrace.tenancy.fair_queue import FairQueue, Queued, TenantQueueFull

TENANTS = "abcd"
QUEUE_LIMIT = 5
LARGEST = 1_000
# Relative rounding error of sums.
SLACK = 1e-6


class FairQueueMachine(RuleBasedStateMachine):
    """Push, pop and remove entries in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue[int](QUEUE_LIMIT)
        self.items = itertools.count()
        self.weights: dict[str, float] = {}
        # Waiting entries by tenant.
        self.model: dict[str, list[Queued[int]]] = {tenant: [] for tenant in TENANTS}
        # For each waiting tenant, the cost served to each other one since it began to wait for its next turn.
        self.before: dict[str, defaultdict[str, float]] = {tenant: defaultdict(float) for tenant in TENANTS}
        # For two waiting tenants: the difference of their served costs by weight, and its extremes.
        self.ahead: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])

    @initialize(
        weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=len(TENANTS), max_size=len(TENANTS))
    )
    def draw_weights(self, weights: list[float]) -> None:
        self.weights = dict(zip(TENANTS, weights, strict=True))

    @rule(
        tenant=st.sampled_from(TENANTS),
        cost=st.sampled_from([1, LARGEST // 3, LARGEST]),
        priority=st.integers(-1, 1),
    )
    def push(self, tenant: str, cost: int, priority: int) -> None:
        line = self.model[tenant]
        if len(line) == QUEUE_LIMIT:
            with pytest.raises(TenantQueueFull):
                self.queue.push(-1, tenant, self.weights[tenant], cost, priority)
            return
        if not line:
            self.before[tenant].clear()
        line.append(self.queue.push(next(self.items), tenant, self.weights[tenant], cost, priority))

    @precondition(lambda self: len(self.queue) > 0)
    @rule()
    def pop(self) -> None:
        entry = self.queue.pop()
        tenant, line = entry.tenant, self.model[entry.tenant]
        assert entry is min(line, key=lambda each: (each.priority, each.number))
        waiting = [name for name in TENANTS if self.model[name]]
        line.remove(entry)
        self.before[tenant].clear()
        for name in waiting:
            if name != tenant:
                self.before[name][tenant] += entry.cost
                self.count(tenant, name, entry.cost / self.weights[tenant])
        self.stop_comparing(tenant)

    @precondition(lambda self: len(self.queue) > 0)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from([each for line in self.model.values() for each in line]))
        self.queue.remove(entry)
        self.model[entry.tenant].remove(entry)
        self.stop_comparing(entry.tenant)
        with pytest.raises(KeyError):
            self.queue.remove(entry)

    @precondition(lambda self: len(self.queue) == 0)
    @rule()
    def reset(self) -> None:
        with pytest.raises(IndexError):
            self.queue.pop()
        self.queue.reset()

    def count(self, served: str, other: str, share: float) -> None:
        pair = (min(served, other), max(served, other))
        ahead = self.ahead[pair]
        ahead[0] += share if served == pair[0] else -share
        ahead[1], ahead[2] = min(ahead[0], ahead[1]), max(ahead[0], ahead[2])

    def stop_comparing(self, tenant: str) -> None:
        """Stop comparing a tenant with others when it has no waiting entries."""
        if not self.model[tenant]:
            for pair in [pair for pair in self.ahead if tenant in pair]:
                del self.ahead[pair]

    def largest(self, *tenants: str) -> float:
        """Return the cost by weight of one largest request of each tenant."""
        return sum(LARGEST / self.weights[tenant] for tenant in tenants)

    @invariant()
    def shares_follow_the_weights(self) -> None:
        for pair, (_, least, most) in self.ahead.items():
            assert most - least <= self.largest(*pair) * (1 + SLACK)

    @invariant()
    def no_tenant_starves(self) -> None:
        for tenant, line in self.model.items():
            if line:
                for other, cost in self.before[tenant].items():
                    assert cost / self.weights[other] <= self.largest(tenant, other) * (1 + SLACK)

    @invariant()
    def counts_match_the_entries(self) -> None:
        assert self.queue.waiting() == {name: len(line) for name, line in self.model.items() if line}
        assert len(self.queue) == sum(map(len, self.model.values())) == len(list(self.queue))


FairQueueMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=80, deadline=None)
TestFairQueue = FairQueueMachine.TestCase


def test_new_tenant_waits_for_one_request_of_each_other() -> None:
    queue = FairQueue[int](100)
    for number in range(60):
        queue.push(number, "ab"[number % 2], 1.0, 500)
    for _ in range(10):
        queue.pop()
    queue.push(-1, "new", 0.01, LARGEST)
    assert "new" in [queue.pop().tenant for _ in range(3)]


def test_weights_are_shares() -> None:
    queue = FairQueue[int](1_000)
    for number in range(1_000):
        queue.push(number, "light", 1.0, 10)
        queue.push(number, "heavy", 3.0, 10)
    assert Counter(queue.pop().tenant for _ in range(400)) == {"light": 100, "heavy": 300}


def test_requests_served_at_once_are_counted_until_reset() -> None:
    queue = FairQueue[int](10)
    queue.push(0, "a", 1.0, 900)
    queue.pop()
    for tenant in "ab":
        queue.push(1, tenant, 1.0, 100)
    assert [queue.pop().tenant for _ in range(2)] == ["b", "a"]
    queue.reset()
    for tenant in "ab":
        queue.push(2, tenant, 1.0, 100)
    with pytest.raises(ValueError):
        queue.reset()
    assert queue.pop().tenant == "a"


def test_changed_weight_applies_to_later_requests() -> None:
    queue = FairQueue[int](10)
    queue.push(0, "a", 1.0, 100)
    queue.push(1, "a", 4.0, 100)
    for number in range(3):
        queue.push(number, "b", 1.0, 50)
    # A cost of 100 at weight 4 counts as 25.
    assert [queue.pop().tenant for _ in range(5)] == ["a", "b", "a", "b", "b"]


def test_queue_of_size_zero_refuses_every_request() -> None:
    queue = FairQueue[int](0)
    with pytest.raises(TenantQueueFull):
        queue.push(0, "a", 1.0, 1)
    assert len(queue) == 0 and queue.waiting() == {}


def test_late_tenant_has_no_credit() -> None:
    queue = FairQueue[int](100)
    for number in range(60):
        queue.push(number, "early", 1.0, 10)
    for _ in range(30):
        queue.pop()
    for number in range(30):
        queue.push(number, "late", 1.0, 10)
    assert Counter(queue.pop().tenant for _ in range(20)) == {"early": 10, "late": 10}


def test_served_cost_is_remembered_while_it_matters() -> None:
    queue = FairQueue[int](100)
    queue.push(0, "a", 1.0, LARGEST)
    queue.pop()
    for number in range(50):
        queue.push(number, f"small {number}", 1.0, 1)
        queue.pop()
    queue.push(1, "a", 1.0, 1)
    queue.push(1, "b", 1.0, 1)
    assert queue.pop().tenant == "b"


def test_inactive_tenants_are_forgotten() -> None:
    queue = FairQueue[int](1)
    for number in range(10_000):
        queue.push(number, f"tenant {number}", 1.0, 1)
        queue.push(number, "always", 1.0, 1)
        queue.pop(), queue.pop()
    assert len(queue._finish) <= 4
