"""Waves among several ranks, with steps, comparisons and calls in every order that the collectives allow."""

from __future__ import annotations

from collections import defaultdict, deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from worker_agent.engine.vllm.lockstep import Waves

NUMBERS = st.integers(0, 3)


class Rank:
    """A rank as its engine thread runs it. `work`: steps that its requests still need."""

    def __init__(self, interval: int) -> None:
        self.waves = Waves(interval)
        self.calls: deque[int] = deque()
        self.work = 0
        # Forward passes, each of which all ranks run together.
        self.passes = 0
        # Whether it waits for the result of a comparison.
        self.comparing = False


class Deployment(RuleBasedStateMachine):
    """A forward pass, and a comparison, ends on a rank only when all ranks have begun it."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks: list[Rank] = []
        # What the ranks have contributed to the comparison after each forward pass.
        self.unfinished: defaultdict[int, list[bool]] = defaultdict(list)

    @initialize(size=st.integers(2, 4), interval=st.integers(1, 5))
    def set_up(self, size: int, interval: int) -> None:
        self.ranks = [Rank(interval) for _ in range(size)]

    @rule(number=NUMBERS, steps=st.integers(1, 12))
    def submit(self, number: int, steps: int) -> None:
        self.pick(number).work += steps

    @rule(number=NUMBERS)
    def read_call(self, number: int) -> None:
        rank = self.pick(number)
        # Calls are commands, which run between steps, and a comparison is part of one.
        if rank.calls and not rank.comparing:
            rank.waves.call(rank.calls.popleft())

    @rule(number=NUMBERS)
    def proceed(self, number: int) -> None:
        rank = self.pick(number)
        if rank.comparing:
            self.end_comparison(rank)
        elif rank.waves.running:
            self.step(rank)
        elif rank.work:
            wave = rank.waves.start()
            for peer in self.ranks:
                if peer is not rank:
                    peer.calls.append(wave)

    def pick(self, number: int) -> Rank:
        return self.ranks[number % len(self.ranks)]

    def step(self, rank: Rank) -> None:
        if any(peer.passes < rank.passes for peer in self.ranks):
            return
        rank.passes += 1
        rank.work = max(0, rank.work - 1)
        if rank.waves.step():
            self.unfinished[rank.passes].append(rank.work > 0)
            rank.comparing = True

    def end_comparison(self, rank: Rank) -> None:
        contributed = self.unfinished[rank.passes]
        if len(contributed) == len(self.ranks):
            rank.comparing = False
            rank.waves.compare(any(contributed))

    @invariant()
    def all_compare_after_the_same_passes(self) -> None:
        if self.ranks:
            done = min(rank.passes for rank in self.ranks)
            compared = {len(self.unfinished[number]) for number in range(1, done + 1)}
            assert compared <= {0, len(self.ranks)}

    @invariant()
    def idle_ranks_agree_on_the_next_wave(self) -> None:
        idle = {rank.waves.number for rank in self.ranks if not rank.waves.running and not rank.calls}
        assert len(idle) <= 1 or any(rank.comparing for rank in self.ranks)

    def teardown(self) -> None:
        """With no more requests, all work gets done, and then all ranks block after the same forward pass."""
        for _ in range(20 * (10 + sum(rank.work for rank in self.ranks))):
            for number in range(len(self.ranks)):
                self.read_call(number)
                self.proceed(number)
        assert not any(rank.work or rank.comparing or rank.waves.running for rank in self.ranks)
        assert len({(rank.passes, rank.waves.number, rank.waves.steps) for rank in self.ranks}) <= 1


TestDeployment = Deployment.TestCase


def test_ranks_compare_after_the_first_step_and_at_the_interval() -> None:
    waves = Waves(3)
    waves.start()
    compares = []
    for _ in range(7):
        compares.append(waves.step())
        if compares[-1]:
            waves.compare(True)
    assert compares == [True, False, True, False, False, True, False]
    assert (waves.number, waves.steps, waves.running) == (0, 7, True)
    waves.compare(False)
    assert (waves.number, waves.steps, waves.running) == (1, 0, False)


def test_late_calls_are_ignored_and_an_early_one_is_an_error() -> None:
    waves = Waves(1)
    waves.call(0)
    assert waves.step()
    waves.compare(False)
    waves.call(0)
    assert not waves.running
    with pytest.raises(RuntimeError, match="called to wave 2, but the next one is 1"):
        waves.call(2)
    assert waves.start() == 1
    with pytest.raises(RuntimeError, match="wave 1 is in progress"):
        waves.start()
