"""The load in a recording: when requests arrived and how long they were, as a `jsonl` workload has it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from tailrace.control.events import Arrived, Reported
from tailrace.control.recording import BrokenOff, Line, RecordingOverflow, Started
from tailrace.request_columns import full
from tailrace.v1 import types_pb2

_GONE: Final = types_pb2.PHASE_UNSPECIFIED


class NothingEndedError(ValueError):
    """No request both arrived and finished, so nothing is known of the lengths of answers."""


@dataclass(slots=True)
class _Request:
    arrival_s: float
    prompt_tokens: int
    max_tokens: int
    # Reported so far; all of them once it has finished.
    output_tokens: int = 0
    reasoning_tokens: int = 0
    finished: bool = False


class RecordedLoad:
    """Collect the requests that arrive during a recording, line by line.

    What ran before it began is left out. A request that had not finished at its end, or that was refused,
    given up or aborted, has an answer of unknown length: it gets the lengths of one that finished, drawn from
    those with at least as many tokens as it had, since the long ones are the most likely to be cut off.
    """

    def __init__(self) -> None:
        """Start without requests."""
        self._began_s = 0.0
        self._requests: dict[str, _Request] = {}
        self._models: set[str] = set()
        # Whether the recording ends before it was to.
        self.ends_early = False

    def add(self, line: Line) -> None:
        """Add a line of the recording."""
        match line:
            case Started():
                self._began_s = line.now_s
            case Arrived():
                self._arrived(line)
            case Reported():
                self._reported(line)
            case RecordingOverflow() | BrokenOff():
                self.ends_early = True
            case _:
                pass

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def models(self) -> int:
        """Return how many models the requests were for."""
        return len(self._models)

    @property
    def unfinished(self) -> int:
        """Return the number of requests whose lengths are drawn."""
        return sum(not request.finished for request in self._requests.values())

    def rows(self) -> Iterator[dict[str, float | int]]:
        """Yield the requests in the order of arrival, each an object of a `jsonl` workload.

        Raise NothingEndedError.
        """
        finished = [request for request in self._requests.values() if request.finished]
        if not finished:
            raise NothingEndedError("no request arrived and finished during the recording: record for longer")
        # The same recording gives the same load.
        draw = random.Random(0)
        for request in self._requests.values():
            model = request if request.finished else _drawn(request, finished, draw)
            reasoning = min(model.reasoning_tokens, model.output_tokens - 1)
            yield {
                "arrival_s": round(request.arrival_s, 6),
                "prompt_tokens": max(1, request.prompt_tokens),
                "reasoning_tokens": reasoning,
                "answer_tokens": model.output_tokens - reasoning,
            }

    def _arrived(self, line: Arrived) -> None:
        asked = line.incoming
        # One that was on an instance before is placed anew: it arrived earlier.
        if asked.admitted or asked.output_tokens or asked.request_id in self._requests:
            return
        self._models.add(asked.model)
        arrival_s = max(0.0, line.now_s - self._began_s)
        self._requests[asked.request_id] = _Request(arrival_s, asked.prompt_tokens, asked.max_tokens)

    def _reported(self, line: Reported) -> None:
        report = line.report
        columns = report.requests
        ids = columns.request_ids
        made, reasoned = (
            full(column, len(ids), 0) for column in (columns.output_tokens, columns.reasoning_tokens)
        )
        for request_id, output_tokens, reasoning_tokens in zip(ids, made, reasoned, strict=True):
            self._counted(request_id, output_tokens, reasoning_tokens)
        for event in report.phase_events:
            self._counted(event.request_id, event.output_tokens, 0)
            if event.phase == _GONE and event.output_tokens:
                self._finished(event.request_id, event.answered.reasoning_tokens)

    def _counted(self, request_id: str, output_tokens: int, reasoning_tokens: int) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            request.output_tokens = max(request.output_tokens, output_tokens)
            request.reasoning_tokens = max(request.reasoning_tokens, reasoning_tokens)

    def _finished(self, request_id: str, reasoning_tokens: int) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            # Exact, where reports only say how far it was; 0: the worker does not tell.
            request.reasoning_tokens = reasoning_tokens or request.reasoning_tokens
            request.finished = True


def _drawn(request: _Request, finished: list[_Request], draw: random.Random) -> _Request:
    """Return a request with the lengths that one may have that did not finish."""
    longest = request.max_tokens or max(each.output_tokens for each in finished)
    possible = [each for each in finished if request.output_tokens <= each.output_tokens <= longest]
    if possible:
        return draw.choice(possible)
    return replace(request, output_tokens=max(1, request.output_tokens))
