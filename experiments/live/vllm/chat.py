"""Encode a streamed chat request, and parse its answer once it has ended."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from tailrace.qoe import TokenRun, qoe
from tests.harness.loadgen import StreamResult, decode_body, post_request

# Gaps of this length are noticeable to a reader.
STALL_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that a user sees of an answer, compared as a whole."""

    reasoning: str
    text: str
    finish_reason: str
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one stream, in seconds.

    `ttft_s`: from submission to the first answering token; `first_token_s`: to the first of any kind, which
    is
    TTFT for systems without phases; `tpot_s`: mean, from the first token of any kind on.
    """

    ttft_s: float
    first_token_s: float
    tpot_s: float
    total_s: float
    # Longest time between two events of the stream; each event is one engine step.
    longest_gap_s: float
    qoe: float
    # Gaps of at least STALL_S, as (begin, end) of time.perf_counter.
    stalls: tuple[tuple[float, float], ...] = ()


class _Delta(msgspec.Struct):
    content: str | None = None
    # vLLM's name; older versions use reasoning_content.
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
    """Return the bytes of a streamed, greedy /v1/chat/completions request."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return post_request(url, "/v1/chat/completions", body)


def read_chat(result: StreamResult, tpot_s: float) -> tuple[Answer, Timing]:
    """Return answer and times of a stream that ended normally.

    Raise ValueError if the body's events are not those that were timed.
    """
    events = [msgspec.json.decode(line[6:], type=_Event) for line in _lines(result.body)]
    if len(events) != len(result.event_times):
        raise ValueError(f"{len(events)} events in the body, {len(result.event_times)} were timed")
    reasoning, text, finish, tokens = "", "", "", 0
    answered: list[TokenRun] = []
    token_times: list[float] = []
    for event, at_s in zip(events, result.event_times, strict=True):
        if event.usage is not None:
            tokens = event.usage.completion_tokens
        for choice in event.choices:
            delta = choice.delta
            thought = delta.reasoning or delta.reasoning_content or ""
            content = delta.content or ""
            reasoning += thought
            text += content
            finish = choice.finish_reason or finish
            if thought or content:
                token_times.append(at_s)
            if content.strip():
                # The tiny model's tokens are bytes.
                answered.append(TokenRun(at_s, 0.0, len(content.encode())))
    first_s = answered[0].first_s if answered else result.finished
    timing = Timing(
        ttft_s=first_s - result.started,
        first_token_s=(token_times[0] if token_times else result.finished) - result.started,
        tpot_s=(token_times[-1] - token_times[0]) / max(1, tokens - 1) if token_times else 0.0,
        total_s=result.finished - result.started,
        longest_gap_s=max((b - a for a, b in itertools.pairwise(token_times)), default=0.0),
        qoe=qoe(answered, tpot_s),
        stalls=tuple((a, b) for a, b in itertools.pairwise(token_times) if b - a >= STALL_S),
    )
    return Answer(reasoning.strip(), text.strip(), finish, tokens), timing


def _lines(body: bytes) -> list[bytes]:
    """Return the lines of events with JSON."""
    return [line for line in decode_body(body).splitlines() if line.startswith(b"data: {")]
