"""One streamed chat: its request's bytes, and what its bytes say, read only after it has ended."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import msgspec

from benchmarks.loadgen import StreamResult
from tailrace.qoe import TokenRun, qoe

# A gap that a reader could notice.
STALL_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Answer:
    """All that a user sees of an answer; two are equal or not."""

    reasoning: str
    text: str
    finish_reason: str
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one stream.

    `ttft_s`: from submission to the first answering token; `first_token_s`: to the first of any kind, TTFT to
    a system that knows no phases; `tpot_s`: mean, from the first token of any kind on.
    """

    ttft_s: float
    first_token_s: float
    tpot_s: float
    total_s: float
    # Longest time between two events of the stream; of these events, one is one engine step.
    longest_gap_s: float
    qoe: float
    # Gaps of STALL_S and more, as (begin, end) of time.perf_counter.
    stalls: tuple[tuple[float, float], ...] = ()


class _Delta(msgspec.Struct):
    content: str | None = None
    # vLLM's name; older ones say reasoning_content.
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


def chat_request(url: str, model: str, messages: Sequence[Mapping[str, str]], max_tokens: int) -> bytes:
    """The bytes of a streamed, greedy /v1/chat/completions request."""
    parts = urlsplit(url)
    body = json.dumps(
        {
            "model": model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def read_chat(result: StreamResult, tpot_s: float) -> tuple[Answer, Timing]:
    """Answer and times of a stream that ended whole.

    Raises ValueError when the body's events are not those that were timed.
    """
    events = [msgspec.json.decode(line[6:], type=_Event) for line in _lines(result.body)]
    if len(events) != len(result.event_times):
        raise ValueError(f"{len(events)} events in the body, {len(result.event_times)} were timed")
    reasoning, text, finish, tokens = "", "", "", 0
    answered: list[TokenRun] = []
    heard: list[float] = []
    for event, at_s in zip(events, result.event_times, strict=True):
        if event.usage is not None:
            tokens = event.usage.completion_tokens
        for choice in event.choices:
            delta = choice.delta
            thought = delta.reasoning or delta.reasoning_content or ""
            said = delta.content or ""
            reasoning += thought
            text += said
            finish = choice.finish_reason or finish
            if thought or said:
                heard.append(at_s)
            if said.strip():
                # A token of the tiny model is a byte.
                answered.append(TokenRun(at_s, 0.0, len(said.encode())))
    first_s = answered[0].first_s if answered else result.finished
    timing = Timing(
        ttft_s=first_s - result.started,
        first_token_s=(heard[0] if heard else result.finished) - result.started,
        tpot_s=(heard[-1] - heard[0]) / max(1, tokens - 1) if heard else 0.0,
        total_s=result.finished - result.started,
        longest_gap_s=max((b - a for a, b in itertools.pairwise(heard)), default=0.0),
        qoe=qoe(answered, tpot_s),
        stalls=tuple((a, b) for a, b in itertools.pairwise(heard) if b - a >= STALL_S),
    )
    return Answer(reasoning.strip(), text.strip(), finish, tokens), timing


def _lines(body: bytes) -> list[bytes]:
    """The events that carry JSON."""
    head, _, rest = body.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        rest = _joined(rest)
    return [line for line in rest.splitlines() if line.startswith(b"data: {")]


def _joined(chunks: bytes) -> bytes:
    """A chunked body (RFC 9112, 7.1) without its chunks' heads."""
    found: list[bytes] = []
    at = 0
    while True:
        end = chunks.find(b"\r\n", at)
        if end < 0:
            return b"".join(found)
        size = int(chunks[at:end].split(b";")[0] or b"0", 16)
        if size == 0:
            return b"".join(found)
        found.append(chunks[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
