"""Parsing of streams and aggregation of figures in experiments.live.vllm, without a fleet."""

from __future__ import annotations

import json

import pytest

from experiments.live.vllm.chat import Answer, read_chat
from experiments.live.vllm.check import References
from experiments.live.vllm.figures import Figures, figures
from experiments.live.vllm.load import Outcome, poisson
from experiments.live.vllm.observe import Observations
from experiments.live.vllm.prompts import FollowUp, max_completion_tokens, messages, mix
from experiments.live.vllm.report import Comparison
from tailrace.tiny.task import task
from tailrace.v1 import migration_pb2, types_pb2
from tests.harness.loadgen import StreamResult
from tests.harness.vllm_fleet import Counts


def event(*, content: str = "", reasoning: str = "", finish: str | None = None) -> bytes:
    delta = {"content": content, "reasoning": reasoning}
    return b"data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": finish}]}).encode() + b"\n\n"


ASKED = task("abcd", 3, 2)
EVENTS = [
    event(reasoning="a"),
    event(reasoning="b"),
    event(content="x"),
    event(content="y", finish="stop"),
    b'data: {"choices": [], "usage": {"completion_tokens": 7}}\n\n',
]


def stream(body: bytes, count: int = 5) -> StreamResult:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    at = [1.0, 1.5, 3.0, 3.25, 3.3][:count]
    return StreamResult(started=0.0, event_times=at, finished=4.0, status=200, body=head + body)


def chunked(parts: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def test_answer_and_times_are_parsed_from_a_chunked_body() -> None:
    answer, timing = read_chat(stream(chunked([*EVENTS, b"data: [DONE]\n\n"])), 0.1)
    assert answer == Answer("ab", "xy", "stop", 7)
    assert (timing.ttft_s, timing.first_token_s, timing.total_s) == (3.0, 1.0, 4.0)
    assert timing.longest_gap_s == 1.5
    assert timing.tpot_s == pytest.approx(2.25 / 6)


def test_an_event_split_between_chunks_is_one_event() -> None:
    whole = b"".join(EVENTS)
    answer, _ = read_chat(stream(chunked([whole[:30], whole[30:]])), 0.1)
    assert answer.text == "xy"


def test_a_body_that_was_not_timed_is_refused() -> None:
    with pytest.raises(ValueError, match="5 events in the body, 4 were timed"):
        read_chat(stream(chunked(EVENTS), count=4), 0.1)


def test_the_load_depends_only_on_the_seed() -> None:
    tasks = mix(0)
    assert poisson(tasks, 3.0, 20.0, 1) == poisson(tasks, 3.0, 20.0, 1)
    assert poisson(tasks, 3.0, 20.0, 1) != poisson(tasks, 3.0, 20.0, 2)
    assert all(arrival.at_s < 20.0 for arrival in poisson(tasks, 3.0, 20.0, 1))
    assert max_completion_tokens(tasks) > max(each.completion_tokens for each in tasks)


def test_a_follow_up_question_includes_the_conversation() -> None:
    question = FollowUp(ASKED.prompt, ASKED.thought, ASKED.answer, (task("wxyz", 5, 1),))
    assert messages(ASKED) == [{"role": "user", "content": ASKED.prompt}]
    assert messages(question) == [
        {"role": "user", "content": "Count down from 5 with wxyz, then from 1."},
        {"role": "assistant", "content": "001:zyxw"},
        *messages(ASKED),
    ]
    # The last question is the same, but the answers are separate.
    short, long = Answer("a", "x", "stop", 2), Answer("b", "y", "stop", 2)
    references = References({ASKED: short, question: long})
    assert references.is_equal(question, long) and not references.is_equal(ASKED, long)


def run(contestant: str, *, equal: bool, preemptions: int) -> Figures:
    _, timing = read_chat(stream(chunked(EVENTS)), 0.1)
    observed = Observations(counts=Counts(preemptions, 0, 10, 20, 0, 0, 0))
    for state in (types_pb2.MIGRATION_STATE_COMMITTED, types_pb2.MIGRATION_STATE_ABORTED):
        observed.migrations.append(migration_pb2.MigrationRecord(reason="load", state=state, pause_ms=5.0))
    return figures(
        contestant, 1, [Outcome(ASKED, equal, "" if equal else "another answer", timing)], observed, 4.0
    )


def test_one_wrong_answer_fails_the_comparison() -> None:
    right = run("a", equal=True, preemptions=4)
    wrong = run("b", equal=False, preemptions=2)
    assert right.passed and right.migrations == {"load": 1} and right.aborted == 1
    assert wrong.failed == [f"{task('abcd', 3, 2).prompt}: another answer"]
    both = Comparison("x", "X", "b", 1.0, "none", ("preemptions", "moved"), [right, wrong])
    assert not both.passed and both.answers == (1, 2)
    assert both.ratios() == {"a": {"preemptions": 0.5, "moved": 1.0}}


def test_answers_are_compared_in_everything_a_user_sees() -> None:
    answer = Answer("ab", "xy", "stop", 7)
    references = References({ASKED: answer})
    assert references.is_equal(ASKED, Answer("ab", "xy", "stop", 7))
    assert not references.is_equal(ASKED, Answer("ab", "xy", "length", 7))
    assert not references.is_equal(ASKED, Answer("ab", "xy", "stop", 8))
