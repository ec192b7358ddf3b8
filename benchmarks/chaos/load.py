"""Clients: each asks one question after the other, and compares every answer."""

from __future__ import annotations

import asyncio
import collections
import itertools
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from benchmarks.chaos.answers import Answer, Ending, Question, Verdict, judge, read_answer
from benchmarks.chaos.cluster import Cluster, Member
from benchmarks.chaos.returning import Received, Way
from benchmarks.chaos.schedule import Tier, Version
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
# Of those that come back: by what, and after how many seconds without anything.
_RETURNING: Final = ((Way.EVENT, 3.0), (Way.KEY, 10.0), (Way.EVENT, 10.0), (Way.KEY, 3.0))
_RETURNING_ONE_IN: Final = 3
# Nobody leaves before the first event so soon: to ask anew makes a busy machine busier.
_FIRST_S: Final = 30.0
_RESUMED_S: Final = 15.0


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
    # Versions that may make it.
    versions: set[Version] = field(default_factory=set)

    @property
    def flows(self) -> bool:
        """A token has come."""
        return self.result is not None and bool(self.result.event_times)


@dataclass(slots=True)
class Tally:
    """Of all streams that have ended."""

    endings: collections.Counter[str] = field(default_factory=collections.Counter)
    tokens: int = 0
    # Longest gap of each whole stream, by what was done to whoever had it; none: under "".
    gaps: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    versions: collections.Counter[str] = field(default_factory=collections.Counter)
    # Longest gap of each whole stream whose client came back, by how it did; and how many were not whole.
    resumed: dict[Way, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    not_resumed: collections.Counter[Way] = field(default_factory=collections.Counter)
    overtaken: int = 0


class Load:
    """So many clients on the front ends that are there."""

    def __init__(self, cluster: Cluster, asked: Sequence[Question], clients: int, timeline: Timeline) -> None:
        self._cluster = cluster
        self._asked = asked
        self._clients = clients
        self._timeline = timeline
        self._right: dict[Question, dict[Version, Answer]] = collections.defaultdict(dict)
        self._versions: Collection[Version] = (Version.FIRST,)
        self._numbers = itertools.count()
        self._open = asyncio.Event()
        self.live: dict[str, Stream] = {}
        self.tally = Tally()

    async def learn(self, version: Version) -> None:
        """Ask everything once while nothing is done to anybody. Raises RuntimeError.

        `version`: the one that takes new requests.
        """
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
            if answer in self._right[question].values():
                raise RuntimeError("two versions give the same answer")
            self._right[question][version] = answer

        async with asyncio.TaskGroup() as group:
            for number, question in enumerate(self._asked):
                group.create_task(ask(number, question))

    async def run(self) -> None:
        """All clients, for ever."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._clients):
                group.create_task(self._client(number))

    def made_by(self, versions: Collection[Version]) -> None:
        """From now on answers are made by one of these, those that are under way also by what they had."""
        self._versions = versions
        for stream in self.live.values():
            stream.versions |= set(versions)
            stream.suffered |= {"rollout"} if len(versions) > 1 else set()

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

    def longest(self) -> tuple[Question, Mapping[Version, Answer]]:
        """The question with the longest answer, and that of each version."""
        question = max(self._asked, key=lambda each: each.max_tokens)
        return question, self._right[question]

    def by_front(self, member: Member) -> list[Stream]:
        """Live ones that a front end carries."""
        return [stream for stream in self.live.values() if stream.front is member]

    def named_in(self, request_id: str) -> Stream | None:
        """The live stream that a request of the cluster's is."""
        at = request_id.find("chaos-")
        return None if at < 0 else self.live.get("-".join(request_id[at:].split("-")[:2]))

    async def ask(self, question: Question, front: Member) -> Ending:
        """One stream to its end, counted."""
        with self._under_way(front) as stream:
            result = await self._connect(stream, question, {})
        verdict = judge(result, self._right[question])
        self._count(stream, verdict, result)
        lost = stream.front.starts != stream.run or not stream.front.ready
        excused = {
            Ending.WHOLE: True,
            Ending.CUT: lost,
            # One that is told to stop takes nothing new.
            Ending.UNREACHED: lost or bool(stream.front.disturbed),
            Ending.REFUSED: True,
        }
        if not excused.get(verdict.ending, False):
            self._timeline.broken(f"{stream.name} on {stream.front.name} {verdict.ending}: {verdict.why}")
        return verdict.ending

    async def ask_until_whole(self, question: Question, front: Member, way: Way, patience_s: float) -> Ending:
        """One whose client comes back whenever it is cut off, or the next event takes so long."""
        until_s = time.monotonic() + _STREAM_S
        with self._under_way(front) as stream:
            received = Received(way, stream.name)
            while True:
                first_s = _RESUMED_S if received.events else _FIRST_S
                received.take(await self._connect(stream, question, received.headers(), first_s, patience_s))
                if received.ended or time.monotonic() > until_s:
                    break
                await asyncio.sleep(_AGAIN_S)
                self._meet(stream, self._other_than(stream.front))
        result = received.result()
        verdict = judge(result, self._right[question])
        if received.wrong:
            verdict = Verdict(Ending.WRONG, received.wrong)
        self._count(stream, verdict, result)
        self.tally.overtaken += received.overtaken
        if verdict.ending is not Ending.WHOLE:
            self.tally.not_resumed[way] += 1
            told = f"{verdict.ending}, though it comes back by {way}: {verdict.why}"
            self._timeline.broken(f"{stream.name}, at last on {stream.front.name}, {told}")
        elif received.connections > 1:
            self.tally.resumed[way].append(_longest_gap(result))
        return verdict.ending

    @contextmanager
    def _under_way(self, front: Member) -> Iterator[Stream]:
        stream = Stream(f"chaos-{next(self._numbers)}", front, front.starts, versions=set(self._versions))
        self._meet(stream, front)
        self.live[stream.name] = stream
        try:
            yield stream
        finally:
            del self.live[stream.name]

    def _meet(self, stream: Stream, front: Member) -> None:
        stream.front, stream.run, stream.result = front, front.starts, None
        if front.disturbed:
            stream.suffered.add("its front end was disturbed")

    def _other_than(self, front: Member) -> Member:
        return next(each for each in self._cluster.of(Tier.FRONTEND) if each is not front)

    async def _connect(
        self,
        stream: Stream,
        question: Question,
        headers: Mapping[str, str],
        first_s: float = math.inf,
        quiet_s: float = math.inf,
    ) -> StreamResult:
        def begun(result: StreamResult) -> None:
            stream.result = result

        url = stream.front.spec.http
        message = question.message(url, stream.name, headers)
        return await run_stream(url, message, _STREAM_S, begun, first_s, quiet_s)

    async def _client(self, number: int) -> None:
        returns = self._cluster.shape.keeps_answers and number % _RETURNING_ONE_IN == 0
        way, patience_s = _RETURNING[number // _RETURNING_ONE_IN % len(_RETURNING)]
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
            question, front = self._asked[turn * 7 % len(self._asked)], fronts[turn % len(fronts)]
            if returns:
                ending = await self.ask_until_whole(question, front, way, patience_s)
            else:
                ending = await self.ask(question, front)
            if ending is not Ending.WHOLE:
                await asyncio.sleep(_AGAIN_S)

    def _count(self, stream: Stream, verdict: Verdict, result: StreamResult) -> None:
        self.tally.endings[verdict.ending] += 1
        if verdict.ending is not Ending.WHOLE:
            return
        self.tally.tokens += result.tokens
        self.tally.versions[verdict.version] += 1
        for suffered in stream.suffered or {""}:
            self.tally.gaps[suffered].append(_longest_gap(result))
        if verdict.version not in stream.versions:
            self._timeline.broken(
                f"{stream.name} on {stream.front.name} was made by the {verdict.version} version, not by "
                f"the {' or '.join(sorted(stream.versions))} one"
            )


def _longest_gap(result: StreamResult) -> float:
    """Between two events; nothing where fewer came."""
    return max(result.gaps, default=0.0)
