"""A live control without a network, driven by random events and recorded from some point on."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tailrace.actions import Action, CopyPrefix, Migrate, Offer, SetPool, WhenFull
from tailrace.cluster import Arrival, Pool, Stage
from tailrace.control.active_policy import ActivePolicy
from tailrace.control.answers import Answer
from tailrace.control.events import (
    Arrived,
    CacheListed,
    CopyOrdered,
    CopySettled,
    KnownMembers,
    MembersChanged,
    MigrationClosed,
    MigrationOpened,
    PolicyFollowed,
    PoolOrdered,
    PoolSettled,
    Reported,
    ReportsStopped,
    Ticked,
    TicksForgotten,
)
from tailrace.control.guard import PolicyGuard
from tailrace.control.live import LiveControl
from tailrace.control.recording import Decided, Line, encode, recorded_answer
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.control.runner import Asked, DecisionPoint
from tailrace.policy.parameters import read_assignments
from tailrace.policy.registry import all_parameters
from tailrace.records import PolicyRecord
from tailrace.slo import Slo
from tailrace.v1 import cache_pb2, monitor_pb2, types_pb2
from tests.scheduler.facts import ANSWERING, GONE, PREFILL, REASONING, event, members, request, steady

INSTANCES = ("a", "b", "c", "d")
STAGES = (Stage(0, 150, ("a", "b")), Stage(150, 1 << 20, ("c", "d")))
POOLS = {"a": Pool.PREFILL, "b": Pool.DECODE, "c": Pool.DECODE, "d": Pool.PREFILL}


class NoMetrics:
    """Metrics that are discarded."""

    def observe_duration(self, point: DecisionPoint, seconds: float) -> None:
        """Discard the duration."""

    def failed(self, policy: str, point: DecisionPoint, why: str) -> None:
        raise AssertionError(f"{policy} failed at {point}: {why}")


class RandomRun:
    """One scheduler; each `step` is a random event."""

    def __init__(self, policy: str, seed: int) -> None:
        """Create a scheduler; `policy` is a name with optional parameters: "tailrace copy_ahead=true"."""
        self.draw = random.Random(seed)
        self.lines: list[bytes] = []
        self.now_s = 100.0
        self.cache_seq = dict.fromkeys(INSTANCES, 0)
        self.open: list[str] = []
        self.orders: list[str] = []
        # The instance of each request, its phase, and its generated tokens.
        self.requests: dict[str, tuple[str, types_pb2.Phase.ValueType, int]] = {}
        self.count = 0
        # Targets of copies in progress.
        self.copies: list[str] = []
        self.copied = 0
        name, *given = policy.split()
        parameters = all_parameters(name, read_assignments(given))
        active = ActivePolicy(PolicyRecord(name=name, parameters=parameters))
        self.control = LiveControl(ReportedCluster(), active, self, PolicyGuard(NoMetrics()))
        self.control.handle(PolicyFollowed(None, Slo()))
        self.set_members()

    # ---- Executor

    def submit(self, actions: Sequence[Action], policy: str, when_full: WhenFull = WhenFull.REFUSE) -> None:
        """Register the actions in the model, as the actuator does."""
        model = self.control.model
        for action in actions:
            if isinstance(action, (Migrate, Offer)):
                found = model.request(action.request_id)
                target = action.target_id if isinstance(action, Migrate) else None
                if found is not None and model.order(MigrationOpened(found, target)):
                    self.open.append(action.request_id)
            elif isinstance(action, SetPool) and model.order(PoolOrdered(action.instance_id, action.pool)):
                self.orders.append(action.instance_id)
            elif isinstance(action, CopyPrefix) and model.order(CopyOrdered(action, self.now_s)):
                self.copied += 1
                self.copies.append(action.target_id)

    # ---- recording

    def record(self) -> None:
        """Start recording."""
        self.lines += [encode(event) for event in self.control.state(self.now_s)]
        self.control.model.tap = self.tap
        self.control.runner.watchers.append(self)

    def tap(self, event: Line) -> None:
        self.lines.append(encode(event))

    def answered(self, policy: str, question: Asked[Answer], answer: Answer) -> None:
        self.tap(Decided(question.point.value, policy, question.request_id, recorded_answer(answer)))

    # ---- events

    def step(self) -> None:
        self.now_s += self.draw.random() * 0.3
        event_method = self.draw.choices(
            [self.arrive, self.report, self.change_phase, self.tick, self.end_order, self.set_members],
            [6, 4, 6, 2, 2, 1],
        )[0]
        event_method()

    @property
    def wall_s(self) -> float:
        return self.now_s + 1e9

    def set_members(self) -> None:
        changed = members(*INSTANCES)
        changed.pools = {name: pool for name, pool in POOLS.items() if self.draw.random() < 0.8}
        changed.stages = STAGES if self.draw.random() < 0.7 else ()
        changed.draining = frozenset(name for name in INSTANCES[:1] if self.draw.random() < 0.2)
        self.control.handle(MembersChanged(KnownMembers.of(changed), self.now_s))
        silent = [name for name in INSTANCES if self.draw.random() < 0.1]
        self.control.handle(ReportsStopped(silent))

    def arrive(self) -> None:
        self.count += 1
        name = f"r{self.count}"
        prompt = self.draw.randint(20, 400)
        names = tuple(range(1 << 63, (1 << 63) + self.draw.randint(0, 6)))
        placed = Arrival(name, prompt, 1_000, block_names=names, block_tokens=16, frontend_id="f")
        _, placement = self.control.handle(Arrived(placed, self.now_s, self.wall_s))
        instance_id = getattr(placement, "instance_id", "")
        if instance_id:
            self.requests[name] = instance_id, PREFILL, 0

    def report(self) -> None:
        name = self.draw.choice(INSTANCES)
        there = [
            request(r, phase, output_tokens=generated, predicted=float(self.draw.randint(1, 900)))
            for r, (where, phase, generated) in self.requests.items()
            if where == name and self.draw.random() < 0.9
        ]
        report = steady(name, there)
        report.load.prefill_delay_s = self.draw.random()
        report.load.prefill_s_per_token = 1e-3
        report.load.max_running_tokens = 5_000
        report.load.future_load.extend([float(self.draw.randint(0, 5_000)) for _ in range(4)])
        report.load.migrations_in = self.draw.randint(0, 2)
        self.cache_seq[name] += self.draw.choice([1, 1, 1, 2])
        stored = [(1 << 63) + n for n in range(self.draw.randint(0, 5))]
        change = cache_pb2.CacheChange(tier=cache_pb2.CACHE_TIER_DEVICE, stored=stored)
        report.cache.seq = self.cache_seq[name]
        report.cache.changes.append(change)
        self.take(report)
        if name in self.control.model.cache.follower.incomplete and self.draw.random() < 0.5:
            listed = cache_pb2.ListCacheReply(incarnation="1", seq=self.cache_seq[name], held=[change])
            self.control.handle(CacheListed(name, listed))

    def change_phase(self) -> None:
        if not self.requests:
            return
        name = self.draw.choice(sorted(self.requests))
        where, phase, generated = self.requests[name]
        later = {PREFILL: REASONING, REASONING: ANSWERING, ANSWERING: GONE}[phase]
        generated += self.draw.randint(1, 120)
        if later == GONE:
            del self.requests[name]
        else:
            self.requests[name] = where, later, generated
        self.take(event(where, name, later, output_tokens=generated))

    def take(self, report: monitor_pb2.WorkerReport) -> None:
        self.control.handle(Reported(report, self.draw.random() < 0.95, self.now_s, self.wall_s))

    def tick(self) -> None:
        if self.draw.random() < 0.1:
            self.control.handle(TicksForgotten())
        self.control.handle(Ticked(self.now_s, self.wall_s))

    def end_order(self) -> None:
        model = self.control.model
        if self.open and self.draw.random() < 0.7:
            name = self.open.pop(self.draw.randrange(len(self.open)))
            model.apply(MigrationClosed(name))
            if name in self.requests:
                where, phase, generated = self.requests[name]
                self.requests[name] = self.draw.choice([where, *INSTANCES]), phase, generated
        elif self.copies and self.draw.random() < 0.7:
            model.apply(CopySettled(self.copies.pop(), self.now_s))
        elif self.orders:
            model.apply(PoolSettled(self.orders.pop()))
