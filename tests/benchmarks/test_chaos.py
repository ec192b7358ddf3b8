"""Chaos: what is drawn, how answers are judged, and a short run on a real cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chaos.__main__ import UNSUPPORTED
from benchmarks.chaos.answers import Answer, Ending, judge, read_answer
from benchmarks.chaos.schedule import RULES, Cast, Kind, Tier, draw
from benchmarks.loadgen import StreamResult

CAST = Cast({tier: [f"{tier.value}-{n}" for n in range(3)] for tier in Tier}, ["pascal", "ares"])
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
RIGHT = Answer("abcd", "length", 3, 2, 1)


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def choice(text: str, reason: str | None = None) -> bytes:
    return event(choices=[{"text": text, "finish_reason": reason}])


USAGE = event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 2})
DONE = b"data: [DONE]\n\n"
WHOLE = choice("ab") + choice("cd", "length") + USAGE + DONE


def judged(body: bytes, status: int = 200) -> Ending:
    return judge(StreamResult(0.0, status=status, body=HEAD + b"\r\n" + body), RIGHT)[0]


@given(st.integers(), st.integers(0, 40), st.integers(0, 40))
def test_a_seed_draws_the_same_faults_and_a_longer_run_begins_with_them(
    seed: int, one: int, other: int
) -> None:
    shorter, longer = sorted((one, other))
    faults = list(draw(seed, longer, CAST, RULES))
    assert list(draw(seed, shorter, CAST, RULES)) == faults[:shorter]
    for fault in faults:
        rule = RULES[fault.kind]
        assert round(rule.shortest_s, 1) <= fault.seconds <= round(rule.longest_s, 1)
        assert not rule.tiers or fault.target in {name for tier in rule.tiers for name in CAST.names[tier]}
        assert fault.other != fault.target or not fault.other


def test_every_kind_comes() -> None:
    assert {fault.kind for fault in draw(1, 1000, CAST, RULES)} == set(RULES)


def test_only_kinds_that_were_asked_for_come() -> None:
    assert {fault.kind for fault in draw(1, 50, CAST, {Kind.CUT, Kind.POISON})} == {Kind.CUT, Kind.POISON}


def test_an_answer_is_read_from_its_events() -> None:
    assert read_answer(HEAD + b"\r\n" + WHOLE) == RIGHT


@given(st.lists(st.integers(1, 20)))
def test_chunks_of_http_do_not_matter(sizes: list[int]) -> None:
    rest, chunked = WHOLE, b""
    for size in [*sizes, len(WHOLE)]:
        part, rest = rest[:size], rest[size:]
        if part:
            chunked += b"%x\r\n%s\r\n" % (len(part), part)
    assert read_answer(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked + b"0\r\n\r\n") == RIGHT


@pytest.mark.parametrize(
    ("body", "status", "ending"),
    [
        (WHOLE, 200, Ending.WHOLE),
        (choice("ab"), 200, Ending.CUT),
        (b"", 0, Ending.CUT),
        (choice("ab") + choice("ab") + choice("cd", "length") + USAGE + DONE, 200, Ending.WRONG),
        (choice("abcx"), 200, Ending.WRONG),
        (choice("ab") + choice("", "length") + USAGE + DONE, 200, Ending.WRONG),
        (WHOLE + DONE, 200, Ending.WRONG),
        (choice("ab") + event(error={"message": "gone"}), 200, Ending.FAILED),
        (choice("ab", "error") + DONE, 200, Ending.FAILED),
        (b'{"error": {}}', 503, Ending.REFUSED),
        (b'{"error": {}}', 500, Ending.FAILED),
    ],
)
def test_an_answer_is_judged(body: bytes, status: int, ending: Ending) -> None:
    assert judged(body, status) is ending


@pytest.mark.slow
@pytest.mark.fleet
async def test_a_short_run() -> None:
    """A cluster with etcd's three members and each process in a network of its own; 45 s on two cores."""
    command = [sys.executable, "-m", "benchmarks.chaos", "--faults", "3", "--seed", "7", "-o", "json"]
    command += ["--workers", "2", "--streams", "6", "--kind", "kill", "cut", "corrupt_kv"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        told, errors = await process.communicate()
    finally:
        # All that it started ends with it.
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if process.returncode == UNSUPPORTED:
        pytest.skip(errors.decode().strip())
    assert told, errors.decode()
    figures = json.loads(told)
    assert not figures["broken"], errors.decode()
    assert figures["streams"]["whole"] > 0
