"""Answers and moves of the last minute."""

from __future__ import annotations

import math

import pytest

from tailrace.control.recent_answers import WINDOW_S, FinishedAnswer, RecentAnswers
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.slo import Slo
from tailrace.v1 import monitor_pb2
from tests.scheduler.facts import GONE, event, members, report_to, request, set_members, steady

GOOD = FinishedAnswer(0.5, 0.05, 1.0, 0)
LATE = FinishedAnswer(3.0, 0.05, 1.0, 0)


def test_figures_are_of_the_last_minute() -> None:
    recent = RecentAnswers()
    recent.finished("a", LATE, 0.0)
    recent.finished("a", GOOD, 10.0)
    recent.finished("b", LATE, 20.0)
    recent.moved("a", "b", 30.0)
    assert recent.of("a", 30.0).attainment(Slo()) == 0.5
    assert recent.of_all(30.0).ttft_s() == pytest.approx((3.0, 3.0))
    later = recent.of("a", WINDOW_S + 1.0)
    assert (later.answers, later.attainment(Slo()), later.moves_out) == ((GOOD,), 1.0, 1)
    assert recent.of_all(WINDOW_S + 31.0).moves_in == 0
    assert recent.of("unknown", 30.0).tpot_s() == (0.0, 0.0)


def test_reasoning_gives_an_answer_more_time() -> None:
    recent = RecentAnswers()
    recent.finished("a", FinishedAnswer(3.0, 0.05, 1.0, 10), 0.0)
    assert recent.of("a", 0.0).attainment(Slo()) == 1.0


def test_instances_that_are_gone_are_forgotten() -> None:
    recent = RecentAnswers()
    recent.finished("a", GOOD, 0.0)
    recent.keep_instances({"b"})
    assert recent.of_all(0.0).answers == ()


def test_a_faulty_worker_adds_nothing() -> None:
    assert FinishedAnswer.of(monitor_pb2.Answered(ttft_s=math.nan)) is None
    assert FinishedAnswer.of(monitor_pb2.Answered(ttft_s=1.0, qoe=math.inf)) is None


def test_reports_show_answers_and_moves_once() -> None:
    state = ReportedCluster()
    set_members(state, members("a", "b"), 0.0)
    report_to(state, steady("a", [request("r0"), request("r1"), request("untold")]), 1.0)
    moved = event("a", "r0", GONE)
    moved.phase_events[0].moved_to_instance_id = "b"
    ended = event("a", "r1", GONE, output_tokens=20)
    ended.phase_events[0].answered.CopyFrom(monitor_pb2.Answered(ttft_s=0.5, tpot_s=0.05, qoe=1.0))
    # Without the times of its answer.
    untold = event("a", "untold", GONE, output_tokens=20)
    # A monitor's snapshot repeats events.
    for report in (moved, ended, untold, moved, ended):
        report_to(state, report, 2.0)
    a, b = state.recent.of("a", 2.0), state.recent.of("b", 2.0)
    assert (a.answers, a.moves_in, a.moves_out) == ((GOOD,), 0, 1)
    assert (b.answers, b.moves_in, b.moves_out) == ((), 1, 0)
