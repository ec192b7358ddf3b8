"""A request that crashes engines is found by its second one, and what shared an engine with it is not blamed.

The engines here are a model: each gives every stream that it has a token a step, and dies in the step in
which a culprit would get the token at which it crashes. Links and their news, which come late, are the
test's.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend_svc.dispatch import Dispatcher
from frontend_svc.links import Loss, LossCause, WorkerLinks
from frontend_svc.probation import PROGRESS_TOKENS, WIDEN_S
from frontend_svc.recovery import EXPLAIN_S, MAX_LOSSES, Recovery
from frontend_svc.streams import Stream, StreamTable
from tailrace.v1 import worker_pb2

STEP_S = 0.02
LENGTH = 12


def nobody() -> frozenset[str]:
    return frozenset()


@dataclass
class Engine:
    """One instance."""

    name: str
    incarnation: int = 0
    attached: bool = True
    dead: bool = False


@dataclass
class Model:
    """Instances, a clock, and what stands for Dispatch and Workers."""

    count: int
    # By request id: the length at which the request crashes its engine.
    crashes: dict[str, int]
    seed: int = 0
    # Seconds until the front end learns that the process of an engine that died is gone; None: it says so
    # itself.
    news_s: float | None = None
    now_s: float = 100.0
    table: StreamTable = field(default_factory=StreamTable)
    deaths: list[str] = field(default_factory=list)
    ended: dict[str, str] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    # Streams that look for an instance.
    looking: dict[int, tuple[Stream, frozenset[str], Callable[[], frozenset[str]]]] = field(
        default_factory=dict
    )
    # How many times each request was placed.
    placements: Counter[str] = field(default_factory=Counter)
    later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.engines = {f"w{n}": Engine(f"w{n}") for n in range(self.count)}
        self.recovery = Recovery(
            self.table,
            cast(Dispatcher, self),
            cast(WorkerLinks, self),
            self.give_up,
            self.deaths.append,
            lambda: self.now_s,
        )
        for engine in self.engines.values():
            self.recovery.attached(engine.name, "0")

    # ---- Workers

    def attached(self) -> list[str]:
        return [engine.name for engine in self.engines.values() if engine.attached]

    def send(self, instance_id: str, message: worker_pb2.AttachUp) -> bool:
        return self.engines[instance_id].attached

    def send_on_wakeup(self, instance_id: str, message: worker_pb2.AttachUp) -> None:
        """Nobody wakes up."""

    # ---- Dispatch

    def start(
        self,
        stream: Stream,
        avoid: frozenset[str] = frozenset(),
        forbidden: Callable[[], frozenset[str]] = nobody,
    ) -> None:
        self.looking[stream.handle] = (stream, avoid, forbidden)

    def cancel(self, stream: Stream) -> None:
        self.looking.pop(stream.handle, None)

    def give_up(self, stream: Stream, reason: str) -> None:
        self.table.close(stream)
        self.ended[stream.request_id] = reason

    # ---- time

    def add(self, request_id: str) -> Stream:
        stream = self.table.open(request_id)
        self.start(stream)
        return stream

    def place(self) -> None:
        """Whoever looks for an instance finds the one with fewest streams."""
        for stream, avoid, forbidden in list(self.looking.values()):
            free = [name for name in self.attached() if name not in forbidden()]
            chosen = min(
                [name for name in free if name not in avoid] or free,
                key=lambda name: (self.table.count_owned(name), name),
                default=None,
            )
            if chosen is not None:
                del self.looking[stream.handle]
                self.table.assign(stream, chosen)
                self.table.confirm_on_engine(chosen, stream.handle, stream.epoch)
                self.placements[stream.request_id] += 1

    def step(self) -> None:
        """Everybody who is somewhere gets a token; engines with a culprit at its length die."""
        self.now_s += STEP_S
        for item in sorted((item for item in self.later if item[0] <= self.now_s), key=lambda item: item[0]):
            self.later.remove(item)
            item[1]()
        self.place()
        for engine in self.engines.values():
            if not engine.attached:
                continue
            streams = [stream for stream in self.table if stream.owner == engine.name]
            if any(self.crashes.get(stream.request_id) == stream.accepted for stream in streams):
                self.die(engine)
                continue
            for stream in streams:
                stream.token_ids.append(stream.accepted)
                if stream.accepted == LENGTH:
                    self.finished.add(stream.request_id)
                    self.table.close(stream)
        self.recovery.check_progress()
        self.recovery.tick()

    def die(self, engine: Engine) -> None:
        """Its process ends; another one takes its place much later, or never."""
        engine.attached, engine.dead = False, True
        if self.news_s is None:
            self.recovery.instance_lost(engine.name, Loss(LossCause.ENGINE_FAILED, "the engine failed"))
            return
        self.recovery.instance_lost(engine.name, Loss(LossCause.BROKEN, "closed"))
        self.later.append((self.now_s + self.news_s, lambda: self.recovery.process_gone(engine.name)))

    def cut(self, engine: Engine, back_s: float) -> None:
        """The network fails its link for so long."""
        if engine.dead or not engine.attached:
            return
        engine.attached = False
        self.recovery.instance_lost(engine.name, Loss(LossCause.BROKEN, "reset"))

        def back() -> None:
            engine.attached = True
            self.recovery.attached(engine.name, str(engine.incarnation))

        self.later.append((self.now_s + back_s, back))

    def run(self, seconds: float) -> None:
        """Until nothing is under way, or so long."""
        until_s = self.now_s + seconds
        while self.now_s < until_s and (len(self.table) or self.later):
            self.step()


def neighbours(model: Model, count: int) -> list[str]:
    names = [f"n{number}" for number in range(count)]
    for name in names:
        model.add(name)
    return names


@pytest.mark.parametrize("news_s", [None, 0.05, 0.5])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_at_most_two_engines_fall_and_all_neighbours_end_right(news_s: float | None, at: int) -> None:
    model = Model(3, {"culprit": at}, news_s=news_s)
    names = neighbours(model, 25)
    model.step()
    model.add("culprit")
    names += [f"m{number}" for number in range(25)]
    for name in names[25:]:
        model.add(name)
    model.run(30)
    assert len(model.deaths) == 2
    assert model.ended == {"culprit": "it was on two engines when they died, and is not tried again"}
    assert model.placements["culprit"] == 2
    assert model.finished == set(names)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(3, 6),
    streams=st.integers(0, 40),
    at=st.integers(0, LENGTH - 1),
    news_s=st.sampled_from([None, 0.02, 0.1, 1.0]),
    cuts=st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(0, 5), st.floats(0.0, 1.5)), max_size=4),
)
def test_whatever_the_network_does_meanwhile_only_the_culprit_is_ended(
    seed: int,
    count: int,
    streams: int,
    at: int,
    news_s: float | None,
    cuts: Sequence[tuple[float, int, float]],
) -> None:
    model = Model(count, {"culprit": at}, seed, news_s)
    for after_s, number, back_s in cuts:
        engine = model.engines[f"w{number % count}"]
        model.later.append((model.now_s + after_s, lambda e=engine, b=back_s: model.cut(e, b)))  # type: ignore[misc]
    names = neighbours(model, streams)
    model.add("culprit")
    model.run(60)
    assert set(model.ended) == {"culprit"}
    assert model.finished == set(names)
    # A network that fails at the wrong moment hides who was where: it may take one engine more.
    assert len(model.deaths) == 2 or (cuts and len(model.deaths) <= 3)


def test_a_machine_that_fails_with_all_its_engines_ends_nobody() -> None:
    """They are lost one after the other; what went from the first to another was never there."""
    model = Model(4, {})
    names = neighbours(model, 4)
    model.place()
    for engine in list(model.engines.values())[:3]:
        model.die(engine)
        for stream, _, _ in list(model.looking.values()):
            # Where nobody is any more, though the front end has not heard of it.
            into = next((each for each in ("w1", "w2") if model.engines[each].attached), "w3")
            del model.looking[stream.handle]
            model.table.assign(stream, into)
    assert model.ended == {}
    for stream in model.table:
        model.table.confirm_on_engine(stream.owner or "", stream.handle, stream.epoch)
    model.run(30)
    assert model.ended == {} and model.finished == set(names)


def test_engines_that_die_for_other_reasons_end_nobody() -> None:
    """kill -9, one after the other, as in a rolling restart; streams get on in between."""
    model = Model(3, {})
    names = neighbours(model, 30)
    for number in range(12):
        for _ in range(PROGRESS_TOKENS * 12):
            model.step()
            if all(stream.accepted > LENGTH - 3 for stream in model.table):
                break
            # They would end too soon.
            for stream in model.table:
                while stream.accepted > 6:
                    stream.token_ids.pop()
                stream.tokens_at_loss = min(stream.tokens_at_loss, stream.accepted - PROGRESS_TOKENS)
        engine = model.engines[f"w{number % 3}"]
        model.die(engine)
        engine.attached, engine.dead = True, False
        engine.incarnation += 1
        model.recovery.attached(engine.name, str(engine.incarnation))
    model.run(60)
    assert model.ended == {} and model.finished == set(names) and len(model.deaths) >= 6


@pytest.mark.parametrize("cause", [LossCause.STOPPED, LossCause.SILENT, LossCause.BROKEN])
def test_a_worker_that_stops_or_is_out_of_reach_says_nothing_of_its_requests(cause: LossCause) -> None:
    model = Model(2, {})
    stream = model.add("r")
    model.place()
    for _ in range(MAX_LOSSES):
        owner = stream.owner
        assert owner is not None
        engine = model.engines[owner]
        engine.attached = False
        model.recovery.instance_lost(owner, Loss(cause, "gone"))
        engine.attached = True
        model.recovery.attached(owner, "0")
        model.place()
        assert stream.deaths == 0
    assert model.ended == {} and model.deaths == []
    model.run(10)
    assert model.finished == {"r"}


def test_one_that_never_gets_on_is_not_tried_for_ever() -> None:
    model = Model(2, {})
    stream = model.add("r")
    model.place()
    for _ in range(MAX_LOSSES + 1):
        owner = stream.owner
        assert owner is not None
        model.recovery.instance_lost(owner, Loss(LossCause.SILENT, "silent"))
        model.recovery.attached(owner, "0")
        model.place()
    assert model.ended == {"r": f"its instance was lost {MAX_LOSSES + 1} times in a row"}


def test_without_news_of_the_instance_nothing_is_held_against_its_streams() -> None:
    model = Model(2, {})
    stream = model.add("r")
    model.place()
    for _ in range(2):
        assert stream.owner is not None
        engine = model.engines[stream.owner]
        engine.attached = False
        model.recovery.instance_lost(stream.owner, Loss(LossCause.BROKEN, "reset"))
        engine.attached = True
        model.place()
    # The second time it is held until more is known.
    assert stream.owner is None and stream.handle not in model.looking
    model.now_s += EXPLAIN_S + 0.1
    model.recovery.tick()
    model.place()
    assert stream.owner is not None and stream.deaths == 0


def test_very_many_suspects_are_not_kept_waiting_one_by_one() -> None:
    model = Model(3, {})
    names = neighbours(model, 600)
    model.step()
    model.die(model.engines["w0"])
    began_s = model.now_s
    model.run(60)
    assert model.finished == set(names) and model.ended == {}
    # 200 one after the other on each of two would take 100 * PROGRESS_TOKENS steps.
    assert model.now_s - began_s < 100 * PROGRESS_TOKENS * STEP_S + WIDEN_S


def test_a_single_instance_that_comes_back_gets_its_streams_back() -> None:
    model = Model(1, {"culprit": 0})
    names = neighbours(model, 10)
    model.step()
    model.add("culprit")
    for incarnation in range(1, 4):
        while model.engines["w0"].attached and len(model.table):
            model.step()
        engine = model.engines["w0"]
        engine.attached, engine.dead, engine.incarnation = True, False, incarnation
        model.recovery.attached("w0", str(incarnation))
    model.run(30)
    assert set(model.ended) == {"culprit"} and model.finished == set(names)
    assert len(model.deaths) == 2
