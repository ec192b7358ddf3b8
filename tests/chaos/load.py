"""Clients: each sends one request after another, and compares every answer."""

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

from tests.chaos.answers import Answer, Ending, Question, Verdict, judge, parse_answer
from tests.chaos.cluster import Cluster, Member
from tests.chaos.gaps import Exposure, longest_gaps
from tests.chaos.reconnecting import ReceivedAnswer, ResumeHeader
from tests.chaos.schedule import Tier, Version
from tests.chaos.timeline import Timeline
from tests.harness.loadgen import StreamResult, run_stream

_REFERENCE_S = 300.0
# Longer than any fault of a front end, and the recovery from it.
_STREAM_S = 240.0
_STREAMING_S = 30.0
_DRAIN_S = 90.0
# At most this share of the clients uses one front end, as behind a load balancer with health checks.
_MAX_SHARE = 0.6
_RETRY_S = 0.3
_POLL_S = 0.02
# For reconnecting clients: the header, and after how many seconds without an event they reconnect.
_RECONNECTS: Final = (
    (ResumeHeader.EVENT, 3.0),
    (ResumeHeader.KEY, 10.0),
    (ResumeHeader.EVENT, 10.0),
    (ResumeHeader.KEY, 3.0),
)
_RECONNECTING_ONE_IN: Final = 3
# Of the others, these send through the edge while it is there.
_THROUGH_EDGE: Final = 1
# The first event may take longer: repeated requests make a busy machine busier.
_FIRST_EVENT_S: Final = 30.0
_RESUMED_EVENT_S: Final = 15.0


@dataclass(eq=False, slots=True)
class Stream:
    """A stream, in progress or ended."""

    name: str
    front: Member
    # How often the front end had been started when the stream began. Of a stream through an edge, of all
    # that it may be on.
    front_starts: Mapping[Member, int]
    # The same of `front` itself, and how often it had been killed.
    edge_starts: int = 0
    edge_kills: int = 0
    result: StreamResult | None = None
    # Faults on the processes that served it.
    exposures: list[Exposure] = field(default_factory=list)
    # Versions that may generate it.
    versions: set[Version] = field(default_factory=set)

    def expose(self, fault: str) -> Exposure:
        """Record a fault on a process that serves the stream now."""
        exposure = Exposure(fault)
        self.exposures.append(exposure)
        return exposure

    @property
    def streaming(self) -> bool:
        """Whether a token has arrived."""
        return self.result is not None and bool(self.result.event_times)


@dataclass(slots=True)
class Tally:
    """Statistics of all streams that have ended."""

    endings: collections.Counter[str] = field(default_factory=collections.Counter)
    tokens: int = 0
    # Longest gap of each complete stream in seconds, by fault on the processes that served it, or NO_FAULT.
    gaps: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    versions: collections.Counter[str] = field(default_factory=collections.Counter)
    # Longest gap of each complete stream whose client reconnected, by header; and how many were not complete.
    resumed: dict[ResumeHeader, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    not_resumed: collections.Counter[ResumeHeader] = field(default_factory=collections.Counter)
    overtaken: int = 0
    # Of the streams through the edge alone.
    through_edge: collections.Counter[str] = field(default_factory=collections.Counter)


class Load:
    """Clients of all front ends."""

    def __init__(
        self, cluster: Cluster, questions: Sequence[Question], clients: int, timeline: Timeline
    ) -> None:
        self._cluster = cluster
        self._questions = questions
        self._clients = clients
        self._timeline = timeline
        self._references: dict[Question, dict[Version, Answer]] = collections.defaultdict(dict)
        self._versions: Collection[Version] = (Version.FIRST,)
        self._numbers = itertools.count()
        self._admitting = asyncio.Event()
        self.live: dict[str, Stream] = {}
        self._rollout_exposures: list[Exposure] = []
        self.tally = Tally()

    async def record_references(self, version: Version) -> None:
        """Ask every question once without faults, and keep the answers. Raise RuntimeError if one fails.

        `version`: the one that takes new requests now.
        """
        fronts = self._cluster.in_tier(Tier.FRONTEND)
        bound = asyncio.Semaphore(self._clients)

        async def ask(number: int, question: Question) -> None:
            async with bound:
                url = fronts[number % len(fronts)].spec.http
                request = question.http_request(url, f"reference-{number}")
                result = await run_stream(url, request, _REFERENCE_S)
            answer = parse_answer(result.body)
            if result.error or answer.error or answer.ends != 1:
                raise RuntimeError(f"failed without a fault: {result.error} {result.body[-500:].decode()}")
            if answer in self._references[question].values():
                raise RuntimeError("two versions give the same answer")
            self._references[question][version] = answer

        async with asyncio.TaskGroup() as group:
            for number, question in enumerate(self._questions):
                group.create_task(ask(number, question))

    async def run(self) -> None:
        """Run all clients, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._clients):
                group.create_task(self._run_client(number))

    def set_versions(self, versions: Collection[Version]) -> None:
        """Set which versions take new requests; streams in progress may also be of those that did before."""
        self._versions = versions
        for stream in self.live.values():
            stream.versions |= set(versions)
        if len(versions) > 1:
            self._rollout_exposures = [stream.expose("rollout") for stream in self.live.values()]
        else:
            for exposure in self._rollout_exposures:
                exposure.end()

    def resume(self) -> None:
        """Let clients send requests."""
        self._admitting.set()

    def pause(self) -> None:
        """Let clients send no further requests."""
        self._admitting.clear()

    async def wait_streaming(self) -> None:
        """Wait until nearly all clients are receiving tokens, or for at most `_STREAMING_S`."""
        try:
            async with asyncio.timeout(_STREAMING_S):
                while not self._all_streaming():  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            self._timeline.note(f"{len(self.live)} streams, not all of which have begun")

    def _all_streaming(self) -> bool:
        """Return whether nearly all stream, without those that wait for an unhealthy front end."""
        streams = self.live.values()
        stuck = sum(not self._is_undisturbed(stream) for stream in streams)
        return sum(stream.streaming and self._is_undisturbed(stream) for stream in streams) >= 0.8 * (
            self._clients - stuck
        )

    def _is_undisturbed(self, stream: Stream) -> bool:
        """Return whether its front end is healthy; through an edge, all that it may be on."""
        return stream.front.healthy and all(each.healthy for each in stream.front_starts)

    async def wait_drained(self) -> list[Stream]:
        """Wait until the streams of all healthy front ends have ended; return those that have not after
        `_DRAIN_S`."""
        remaining: list[Stream] = []
        try:
            async with asyncio.timeout(_DRAIN_S):
                while remaining := [each for each in self.live.values() if self._is_undisturbed(each)]:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return remaining
        return []

    def longest_question(self) -> tuple[Question, Mapping[Version, Answer]]:
        """Return the question with the longest answer, and the answer of each version."""
        question = max(self._questions, key=lambda each: each.max_tokens)
        return question, self._references[question]

    def streams_of(self, member: Member) -> list[Stream]:
        """Return the live streams of a front end."""
        return [stream for stream in self.live.values() if stream.front is member]

    def find_stream(self, request_id: str) -> Stream | None:
        """Return the live stream that has this request ID in the cluster; None if there is none."""
        at = request_id.find("chaos-")
        return None if at < 0 else self.live.get("-".join(request_id[at:].split("-")[:2]))

    async def ask(self, question: Question, front: Member) -> Ending:
        """Run one stream to its end, and record the verdict."""
        with self._registered(front) as stream:
            result = await self._connect(stream, question, {})
        verdict = judge(result, self._references[question])
        self._record_verdict(stream, verdict, result)
        lost = any(each.starts != starts or not each.ready for each, starts in stream.front_starts.items())
        restarted = lost or stream.front.starts != stream.edge_starts or bool(stream.front.active_faults)
        if stream.front.tier is Tier.EDGE:
            self.tally.through_edge[verdict.ending] += 1
            # One that stops finishes its streams, though not a connection without a request.
            lost = lost or stream.front.kills != stream.edge_kills or (restarted and not result.body)
        allowed = {
            Ending.WHOLE: True,
            Ending.CUT: lost,
            # A front end that is shutting down accepts nothing new.
            Ending.UNREACHED: restarted,
            Ending.REFUSED: True,
        }
        if not allowed.get(verdict.ending, False):
            self._timeline.violation(
                f"{stream.name} on {stream.front.name} {verdict.ending}: {verdict.reason}"
            )
        return verdict.ending

    async def ask_with_reconnects(
        self, question: Question, front: Member, header: ResumeHeader, patience_s: float
    ) -> Ending:
        """Run one stream whose client reconnects whenever it is cut off, or no event arrives for
        `patience_s`."""
        until_s = time.monotonic() + _STREAM_S
        with self._registered(front) as stream:
            received = ReceivedAnswer(header, stream.name)
            while True:
                first_s = _RESUMED_EVENT_S if received.events else _FIRST_EVENT_S
                received.add_connection(
                    await self._connect(stream, question, received.headers(), first_s, patience_s)
                )
                if received.ended or time.monotonic() > until_s:
                    break
                await asyncio.sleep(_RETRY_S)
                self._assign(stream, self._other_front(stream.front))
        result = received.result()
        verdict = judge(result, self._references[question])
        if received.violation:
            verdict = Verdict(Ending.WRONG, received.violation)
        self._record_verdict(stream, verdict, result)
        self.tally.overtaken += received.overtaken
        if verdict.ending is not Ending.WHOLE:
            self.tally.not_resumed[header] += 1
            self._timeline.violation(
                f"{stream.name}, last on {stream.front.name}, {verdict.ending} although its client "
                f"reconnects by {header}: {verdict.reason}"
            )
        elif received.connections > 1:
            self.tally.resumed[header].append(_longest_gap(result))
        return verdict.ending

    @contextmanager
    def _registered(self, front: Member) -> Iterator[Stream]:
        stream = Stream(f"chaos-{next(self._numbers)}", front, {}, versions=set(self._versions))
        self._assign(stream, front)
        self.live[stream.name] = stream
        try:
            yield stream
        finally:
            del self.live[stream.name]

    def _assign(self, stream: Stream, front: Member) -> None:
        fronts = self._cluster.in_tier(Tier.FRONTEND) if front.tier is Tier.EDGE else [front]
        stream.front, stream.front_starts = front, {each: each.starts for each in fronts}
        stream.edge_starts, stream.edge_kills, stream.result = front.starts, front.kills, None
        if front.active_faults:
            stream.expose("its front end was disturbed")

    def _other_front(self, front: Member) -> Member:
        return next(each for each in self._cluster.in_tier(Tier.FRONTEND) if each is not front)

    async def _connect(
        self,
        stream: Stream,
        question: Question,
        headers: Mapping[str, str],
        first_s: float = math.inf,
        quiet_s: float = math.inf,
    ) -> StreamResult:
        def on_start(result: StreamResult) -> None:
            stream.result = result

        url = stream.front.spec.http
        request = question.http_request(url, stream.name, headers)
        return await run_stream(url, request, _STREAM_S, on_start, first_s, quiet_s)

    async def _run_client(self, number: int) -> None:
        reconnects = self._cluster.shape.keeps_answers and number % _RECONNECTING_ONE_IN == 0
        header, patience_s = _RECONNECTS[number // _RECONNECTING_ONE_IN % len(_RECONNECTS)]
        for turn in itertools.count(number):
            await self._admitting.wait()
            fronts = [
                front
                for front in self._cluster.in_tier(Tier.FRONTEND)
                if front.ready and len(self.streams_of(front)) < _MAX_SHARE * self._clients
            ]
            if number % _RECONNECTING_ONE_IN == _THROUGH_EDGE:
                fronts = [edge for edge in self._cluster.in_tier(Tier.EDGE) if edge.ready] or fronts
            if not fronts:
                await asyncio.sleep(_RETRY_S)
                continue
            question, front = self._questions[turn * 7 % len(self._questions)], fronts[turn % len(fronts)]
            if reconnects:
                ending = await self.ask_with_reconnects(question, front, header, patience_s)
            else:
                ending = await self.ask(question, front)
            if ending is not Ending.WHOLE:
                await asyncio.sleep(_RETRY_S)

    def _record_verdict(self, stream: Stream, verdict: Verdict, result: StreamResult) -> None:
        self.tally.endings[verdict.ending] += 1
        if verdict.ending is not Ending.WHOLE:
            return
        self.tally.tokens += result.tokens
        self.tally.versions[verdict.version] += 1
        for fault, gap_s in longest_gaps(result.event_times, stream.exposures).items():
            self.tally.gaps[fault].append(gap_s)
        if verdict.version not in stream.versions:
            self._timeline.violation(
                f"{stream.name} on {stream.front.name} was generated by the {verdict.version} version, "
                f"not by the {' or '.join(sorted(stream.versions))} one"
            )


def _longest_gap(result: StreamResult) -> float:
    """Return the longest time between two events in seconds; 0 with fewer than two."""
    return max(result.gaps, default=0.0)
