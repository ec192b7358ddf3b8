"""A worker's model of the pace at which users can read answers."""

from __future__ import annotations

import pytest

from tailrace.qoe import TokenRun, qoe
from tailrace.slo import Slo
from worker_agent.engine.base import RequestKey
from worker_agent.running_requests import AnswerPace, RunningRequests

TPOT_S = 0.1


def test_pace_counted_at_reports_equals_pace_timed_per_token() -> None:
    pace = AnswerPace(TPOT_S)
    pace.begin(7, 100.0)
    for report in range(1, 9):
        pace.count(8 + 2 * report, 100.0 + 0.5 * report)
    assert pace.qoe == pytest.approx(qoe([TokenRun(0.0, 0.0, 1), TokenRun(0.25, 0.25, 16)], TPOT_S))
    assert pace.slack_tokens(104.0) == pytest.approx(17 - 41)


def test_no_pace_before_the_answer() -> None:
    pace = AnswerPace(TPOT_S)
    pace.count(10, 1.0)
    assert not pace.begun and pace.leave(1.0) is None and pace.qoe == 1.0


def test_pace_starts_at_the_first_begin() -> None:
    pace = AnswerPace(TPOT_S)
    pace.begin(3, 1.0)
    pace.begin(9, 5.0)
    assert pace.slack_tokens(1.0) == 0.0


def test_pace_continues_on_another_worker() -> None:
    source, target = AnswerPace(TPOT_S), AnswerPace(TPOT_S)
    source.begin(3, 50.0)
    source.count(9, 51.0)
    handed_over = source.leave(51.0)
    assert handed_over is not None
    # On another machine with a different clock.
    target.go_on(handed_over, 9, 951.0)
    assert target.qoe == pytest.approx(source.qoe)
    assert target.slack_tokens(951.0) == pytest.approx(source.slack_tokens(51.0))
    for pace, now_s in ((source, 52.0), (target, 952.0)):
        pace.count(12, now_s)
    assert target.qoe == pytest.approx(source.qoe)


def test_pace_after_a_loss_comes_from_the_front_end() -> None:
    pace = AnswerPace(TPOT_S)
    pace.recover(21, 2.0, 30, 100.0)
    assert pace.slack_tokens(100.0) == pytest.approx(0.0)
    assert pace.qoe == pytest.approx(1.0)
    without_answer = AnswerPace(TPOT_S)
    without_answer.recover(0, 0.0, 30, 100.0)
    assert not without_answer.begun


def test_pace_follows_the_slo_of_the_deployment() -> None:
    slo = Slo(2.0, 0.05)
    running = RunningRequests(lambda: slo.reading_s)
    first = running.add(RequestKey(0, 1), "one", "f", 0)
    # After a change of the SLO, running requests keep theirs.
    slo = Slo(2.0, 0.05, pace_s=0.2)
    second = running.add(RequestKey(0, 2), "two", "f", 0)
    for request in (first, second):
        request.pace.begin(0, 0.0)
    assert first.pace.slack_tokens(1.0) == pytest.approx(1 - 21.0)
    assert second.pace.slack_tokens(1.0) == pytest.approx(1 - 6.0)


@pytest.mark.parametrize(
    ("slo", "reading_s"),
    [(Slo(), 0.1), (Slo(2.0, 0.05), 0.05), (Slo(2.0, None), 0.1), (Slo(2.0, 0.05, pace_s=0.3), 0.3)],
)
def test_reading_pace_of_an_slo(slo: Slo, reading_s: float) -> None:
    assert slo.reading_s == reading_s


def test_a_finished_answer_as_its_user_saw_it() -> None:
    pace = AnswerPace(TPOT_S)
    # After 7 reasoning tokens, and 2.5 s after the request arrived.
    pace.begin(7, 100.0)
    pace.count(12, 102.0)
    answered = pace.answered(97.5, 12)
    assert (answered.ttft_s, answered.tpot_s, answered.reasoning_tokens) == (2.5, 0.5, 7)
    assert answered.qoe == pytest.approx(pace.qoe)
    alone = AnswerPace(TPOT_S)
    alone.begin(0, 100.0)
    assert alone.answered(99.0, 1).tpot_s == 0.0
