"""Clients: each asks one question after the other, and compares every answer."""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.chaos.answers import Answer, Ending, Question, judge, read_answer
from benchmarks.chaos.cluster import Cluster, Member
from benchmarks.chaos.schedule import Tier
from benchmarks.chaos.timeline import Timeline
from benchmarks.loadgen import StreamResult, run_stream

_REFERENCE_S = 300.0
# Longer than anything that is done to a front end, and what it takes to get over it.
_STREAM_S = 240.0
_FLOW_S = 30.0
_END_S = 90.0
# No more of the clients wait for one front end, as behind a balancer that looks.
_SHARE = 0.6
_AGAIN_S = 0.3
_POLL_S = 0.02


@dataclass(eq=False, slots=True)
class Stream:
    """One that is under way, or has ended."""

    name: str
    front: Member
    # The front end's run that it was begun with.
    run: int
    result: StreamResult | None = None
    # What was done to whoever had it.
    suffered: set[str] = field(default_factory=set)

    @property
    def flows(self) -> bool:
        """A token has come."""
        return self.result is not None and bool(self.result.event_times)

    @property
    def gap_s(self) -> float:
        """The longest time between two events; nothing where fewer came."""
        return max(self.result.gaps, default=0.0) if self.result is not None else 0.0


@dataclass(slots=True)
class Tally:
    """Of all streams that have ended."""

    endings: collections.Counter[str] = field(default_factory=collections.Counter)
    tokens: int = 0
    # Longest gap of each whole stream, by what was done to whoever had it; none: under "".
    gaps: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))


class Load:
    """So many clients on the front ends that are there."""

    def __init__(self, cluster: Cluster, asked: Sequence[Question], clients: int, timeline: Timeline) -> None:
        self._cluster = cluster
        self._asked = asked
        self._clients = clients
        self._timeline = timeline
        self._right: dict[Question, Answer] = {}
        self._numbers = itertools.count()
        self._open = asyncio.Event()
        self.live: dict[str, Stream] = {}
        self.tally = Tally()

    async def learn(self) -> None:
        """Ask everything once while nothing is done to anybody. Raises RuntimeError."""
        fronts = self._cluster.of(Tier.FRONTEND)
        bound = asyncio.Semaphore(self._clients)

        async def ask(number: int, question: Question) -> None:
            async with bound:
                url = fronts[number % len(fronts)].spec.http
                message = question.message(url, f"reference-{number}")
                result = await run_stream(url, message, _REFERENCE_S)
            answer = read_answer(result.body)
            if result.error or answer.error or answer.ends != 1:
                raise RuntimeError(f"undisturbed, and yet: {result.error} {result.body[-500:].decode()}")
            self._right[question] = answer

        async with asyncio.TaskGroup() as group:
            for number, question in enumerate(self._asked):
                group.create_task(ask(number, question))

    async def run(self) -> None:
        """All clients, for ever."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._clients):
                group.create_task(self._client(number))

    def let_in(self) -> None:
        """Clients ask."""
        self._open.set()

    def keep_out(self) -> None:
        """Clients ask nothing new."""
        self._open.clear()

    async def flowing(self) -> None:
        """Until nearly all clients have a stream that flows, or for a while."""
        try:
            async with asyncio.timeout(_FLOW_S):
                while not self._flow():  # noqa: ASYNC110 - streams tell nobody
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            self._timeline.note(f"{len(self.live)} streams, not all of which flow")

    def _flow(self) -> bool:
        """Those that wait for a front end to which something is done do not count."""
        streams = self.live.values()
        stuck = sum(not stream.front.well for stream in streams)
        return sum(stream.flows and stream.front.well for stream in streams) >= 0.8 * (self._clients - stuck)

    async def ended(self) -> list[Stream]:
        """Until the streams of all front ends to which nothing is done have ended; those that do not, after
        a while."""
        left: list[Stream] = []
        try:
            async with asyncio.timeout(_END_S):
                while left := [stream for stream in self.live.values() if stream.front.well]:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return left
        return []

    def longest(self) -> tuple[Question, Answer]:
        """The question with the longest answer."""
        question = max(self._asked, key=lambda each: each.max_tokens)
        return question, self._right[question]

    def by_front(self, member: Member) -> list[Stream]:
        """Live ones that a front end carries."""
        return [stream for stream in self.live.values() if stream.front is member]

    def named_in(self, request_id: str) -> Stream | None:
        """The live stream that a request of the cluster's is."""
        at = request_id.find("chaos-")
        return None if at < 0 else self.live.get("-".join(request_id[at:].split("-")[:2]))

    async def ask(self, question: Question, front: Member) -> tuple[Ending, str, Stream]:
        """One stream to its end, counted."""
        stream = Stream(f"chaos-{next(self._numbers)}", front, front.starts)

        def begun(result: StreamResult) -> None:
            stream.result = result

        self.live[stream.name] = stream
        if front.disturbed:
            stream.suffered.add("its front end was disturbed")
        message = question.message(front.spec.http, stream.name)
        try:
            result = await run_stream(front.spec.http, message, _STREAM_S, begun)
        finally:
            del self.live[stream.name]
        ending, why = judge(result, self._right[question])
        self._count(stream, ending, why)
        return ending, why, stream

    async def _client(self, number: int) -> None:
        for turn in itertools.count(number):
            await self._open.wait()
            fronts = [
                front
                for front in self._cluster.of(Tier.FRONTEND)
                if front.ready and len(self.by_front(front)) < _SHARE * self._clients
            ]
            if not fronts:
                await asyncio.sleep(_AGAIN_S)
                continue
            question = self._asked[turn * 7 % len(self._asked)]
            ending, _, _ = await self.ask(question, fronts[turn % len(fronts)])
            if ending is not Ending.WHOLE:
                await asyncio.sleep(_AGAIN_S)

    def _count(self, stream: Stream, ending: Ending, why: str) -> None:
        self.tally.endings[ending] += 1
        if ending is Ending.WHOLE:
            assert stream.result is not None
            self.tally.tokens += stream.result.tokens
            for suffered in stream.suffered or {""}:
                self.tally.gaps[suffered].append(stream.gap_s)
            return
        front = stream.front
        lost = front.starts != stream.run or not front.ready
        excused = {
            Ending.CUT: lost,
            # One that is told to stop takes nothing new.
            Ending.UNREACHED: lost or bool(front.disturbed),
            Ending.REFUSED: True,
        }
        if not excused.get(ending, False):
            self._timeline.broken(f"{stream.name} on {front.name} {ending}: {why}")
