"""What a streamed completion said, read from the bytes of its HTTP answer, and what is right."""

from __future__ import annotations

import enum
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.chaos.cluster import KEY, MODEL
from benchmarks.chaos.schedule import Version
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

    def message(self, url: str, request_id: str, headers: Mapping[str, str] = MappingProxyType({})) -> bytes:
        """The HTTP request."""
        headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": request_id, **headers}
        return completion_request(url, MODEL, self.prompt, self.max_tokens, self.seed, headers)


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
    text, reason, error = [], "", ""
    prompt = completion = ends = 0
    for line in unchunked(body).split(b"\n"):
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


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a stream ended, and in words what was not right. `version`: whose text it is, or could be."""

    ending: Ending
    why: str = ""
    version: Version = Version.FIRST


def judge(result: StreamResult, right: Mapping[Version, Answer]) -> Verdict:
    """By what each version gives undisturbed."""
    verdicts = [_judge(result, answer, version) for version, answer in right.items()]
    best = min(verdicts, key=lambda verdict: list(Ending).index(verdict.ending))
    if best.ending is Ending.WRONG and len(verdicts) > 1:
        why = "; ".join(f"{verdict.version}: {verdict.why}" for verdict in verdicts)
        return Verdict(Ending.WRONG, why)
    return best


def _judge(result: StreamResult, right: Answer, version: Version) -> Verdict:
    answer = read_answer(result.body)
    ending, why = _compare(result, answer, right)
    return Verdict(ending, why, version)


def _compare(result: StreamResult, answer: Answer, right: Answer) -> tuple[Ending, str]:
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


def unchunked(body: bytes) -> bytes:
    """What an HTTP answer carries, as far as it came."""
    head, _, data = body.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head.lower():
        return data
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
