"""What a streamed completion said, read from the bytes of its HTTP answer, and what is right."""

from __future__ import annotations

import enum
import json
import random
from dataclasses import dataclass

from benchmarks.chaos.cluster import KEY, MODEL
from benchmarks.loadgen import StreamResult, completion_request


class Ending(enum.StrEnum):
    """How a stream ended."""

    WHOLE = "whole"
    # Refused before the first token, with a status that says: try again.
    REFUSED = "refused"
    # Nobody listens.
    UNREACHED = "unreached"
    # Cut off: right as far as it came.
    CUT = "cut off"
    # An error was told, where there was an answer to give.
    FAILED = "failed"
    # Text that is not the right one.
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that a client sees. `ends`: how often the stream said that it was over."""

    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ends: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """One request, asked over and over."""

    prompt: str
    max_tokens: int
    seed: int

    def message(self, url: str, request_id: str) -> bytes:
        """The HTTP request."""
        plain = completion_request(url, MODEL, self.prompt, self.max_tokens, self.seed)
        more = f"\r\nAuthorization: Bearer {KEY}\r\nX-Request-Id: {request_id}\r\n\r\n"
        return plain.replace(b"\r\n\r\n", more.encode(), 1)


def questions(seed: int, count: int, longest: int) -> list[Question]:
    """Different ones, with answers of up to so many tokens, and prompts of a hundred to a thousand."""
    chance = random.Random(f"{seed}/questions")
    return [
        Question(
            f"question {number}: " + "".join(chance.choices("abcdefgh ", k=chance.randint(100, 1000))),
            chance.randint(longest // 5, longest),
            chance.randint(0, 1 << 30),
        )
        for number in range(count)
    ]


def read_answer(body: bytes) -> Answer:
    """From an HTTP answer with server-sent events, chunked or not, as far as it came."""
    head, _, rest = body.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        rest = _unchunked(rest)
    text, reason, error = [], "", ""
    prompt = completion = ends = 0
    for line in rest.split(b"\n"):
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            ends += 1
            continue
        try:
            event = json.loads(data)
        except ValueError:
            continue
        if not isinstance(event, dict):
            continue
        if event.get("error"):
            error = str(event["error"])
        for choice in event.get("choices", ()):
            text.append(choice.get("text") or "")
            reason = choice.get("finish_reason") or reason
        if usage := event.get("usage"):
            prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    return Answer("".join(text), reason, prompt, completion, ends, error)


def judge(result: StreamResult, right: Answer) -> tuple[Ending, str]:
    """How it ended, and in words what was not right."""
    answer = read_answer(result.body)
    if not result.body and "Connect" in result.error:
        return Ending.UNREACHED, result.error
    if result.status in (429, 503) and not answer.text:
        return Ending.REFUSED, f"HTTP {result.status}"
    if result.status not in (0, 200):
        return Ending.FAILED, f"HTTP {result.status}: {result.body[-300:].decode(errors='replace')}"
    if not right.text.startswith(answer.text):
        return Ending.WRONG, _difference(answer.text, right.text)
    if answer.error or answer.finish_reason not in ("", right.finish_reason):
        told = answer.error or answer.finish_reason
        return Ending.FAILED, f"after {len(answer.text)} letters: {told}"
    if not answer.ends:
        return Ending.CUT, f"after {len(answer.text)} letters of {len(right.text)}: {result.error}"
    if answer != right:
        return Ending.WRONG, f"not the same: {_without_text(answer)} in place of {_without_text(right)}"
    return Ending.WHOLE, ""


def _unchunked(data: bytes) -> bytes:
    out = bytearray()
    while data:
        size, _, data = data.partition(b"\r\n")
        try:
            length = int(size, 16)
        except ValueError:
            break
        out += data[:length]
        data = data[length + 2 :]
    return bytes(out)


def _difference(got: str, right: str) -> str:
    at = next((n for n, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), len(right))
    return f"from letter {at} on: {got[at : at + 20]!r} in place of {right[at : at + 20]!r}"


def _without_text(answer: Answer) -> str:
    tokens = f"{answer.prompt_tokens}+{answer.completion_tokens} tokens"
    return f"{len(answer.text)} letters, {answer.finish_reason}, {tokens}, {answer.ends} ends"
