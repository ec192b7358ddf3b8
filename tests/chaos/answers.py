"""Parse streamed completions from the bytes of their HTTP answers, and compare them with the expected
ones."""

from __future__ import annotations

import enum
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tests.chaos.cluster import KEY, MODEL
from tests.chaos.schedule import Version
from tests.harness.loadgen import StreamResult, completion_request, decode_body


class Ending(enum.StrEnum):
    """How a stream ended."""

    WHOLE = "whole"
    # Refused before the first token, with a status that asks the client to retry.
    REFUSED = "refused"
    # The connection was refused.
    UNREACHED = "unreached"
    # Cut off; correct up to that point.
    CUT = "cut off"
    # Ended with an error.
    FAILED = "failed"
    # The text is not the expected one.
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that a client sees. `ends`: how often the stream sent its end marker."""

    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ends: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """One request, which is sent repeatedly."""

    prompt: str
    max_tokens: int
    seed: int

    def http_request(
        self, url: str, request_id: str, headers: Mapping[str, str] = MappingProxyType({})
    ) -> bytes:
        """Return the HTTP request."""
        headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": request_id, **headers}
        return completion_request(url, MODEL, self.prompt, self.max_tokens, self.seed, headers)


def draw_questions(seed: int, count: int, max_answer_tokens: int) -> list[Question]:
    """Draw different ones, with answers of up to `max_answer_tokens`, and prompts of 100 to 1,000
    characters."""
    rng = random.Random(f"{seed}/questions")
    return [
        Question(
            f"question {number}: " + "".join(rng.choices("abcdefgh ", k=rng.randint(100, 1000))),
            rng.randint(max_answer_tokens // 5, max_answer_tokens),
            rng.randint(0, 1 << 30),
        )
        for number in range(count)
    ]


def parse_answer(body: bytes) -> Answer:
    """Parse an HTTP answer with server-sent events, chunked or not, possibly truncated."""
    text, reason, error = [], "", ""
    prompt = completion = ends = 0
    for line in decode_body(body).split(b"\n"):
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
    """How a stream ended, and why if not as expected. `version`: the one that generated it, or may have."""

    ending: Ending
    reason: str = ""
    version: Version = Version.FIRST


def judge(result: StreamResult, expected: Mapping[Version, Answer]) -> Verdict:
    """Compare a stream with what each version generates undisturbed."""
    verdicts = [_judge(result, answer, version) for version, answer in expected.items()]
    best = min(verdicts, key=lambda verdict: list(Ending).index(verdict.ending))
    if best.ending is Ending.WRONG and len(verdicts) > 1:
        reason = "; ".join(f"{verdict.version}: {verdict.reason}" for verdict in verdicts)
        return Verdict(Ending.WRONG, reason)
    return best


def _judge(result: StreamResult, expected: Answer, version: Version) -> Verdict:
    answer = parse_answer(result.body)
    ending, reason = _compare(result, answer, expected)
    return Verdict(ending, reason, version)


def _compare(result: StreamResult, answer: Answer, expected: Answer) -> tuple[Ending, str]:
    if not result.body and "Connect" in result.error:
        return Ending.UNREACHED, result.error
    if result.status in (429, 503) and not answer.text:
        return Ending.REFUSED, f"HTTP {result.status}"
    if result.status not in (0, 200):
        return Ending.FAILED, f"HTTP {result.status}: {result.body[-300:].decode(errors='replace')}"
    if not expected.text.startswith(answer.text):
        return Ending.WRONG, _difference(answer.text, expected.text)
    if answer.error or answer.finish_reason not in ("", expected.finish_reason):
        reason = answer.error or answer.finish_reason
        return Ending.FAILED, f"after {len(answer.text)} characters: {reason}"
    if not answer.ends:
        return Ending.CUT, f"after {len(answer.text)} characters of {len(expected.text)}: {result.error}"
    if answer != expected:
        return Ending.WRONG, f"expected {_summarize(expected)}, got {_summarize(answer)}"
    return Ending.WHOLE, ""


def _difference(got: str, expected: str) -> str:
    at = next((n for n, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), len(expected))
    return f"from character {at} on: expected {expected[at : at + 20]!r}, got {got[at : at + 20]!r}"


def _summarize(answer: Answer) -> str:
    tokens = f"{answer.prompt_tokens}+{answer.completion_tokens} tokens"
    return f"{len(answer.text)} characters, {answer.finish_reason}, {tokens}, {answer.ends} ends"
