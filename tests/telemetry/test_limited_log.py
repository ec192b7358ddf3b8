"""Frequent messages of one kind are counted instead of logged."""

from __future__ import annotations

import logging

import pytest

from tailrace.telemetry.incidents import LimitedLog

log = logging.getLogger(__name__)


class Clock:
    """A clock that tests set, in seconds."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_messages_within_the_interval_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    limited = LimitedLog(log, 10.0, clock)
    for number in range(4):
        limited.write(logging.INFO, "migrations", f"refused {number}")
    clock.now_s += 10.0
    limited.write(logging.INFO, "migrations", "refused again")
    clock.now_s += 10.0
    limited.write(logging.INFO, "migrations", "refused later")
    assert caplog.messages == [
        "refused 0",
        "refused again (and 3 more such messages in the last 10 s)",
        "refused later",
    ]


def test_each_kind_is_logged_at_its_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    limited = LimitedLog(log, 10.0, Clock())
    limited.write(logging.INFO, "one", "100% full")
    limited.write(logging.WARNING, "other", "unreachable")
    limited.write(logging.WARNING, "other", "unreachable")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "100% full"),
        ("WARNING", "unreachable"),
    ]


def test_a_burst_is_logged_whole(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    limited = LimitedLog(log, 10.0, clock, burst=3)
    for number in range(5):
        limited.write(logging.WARNING, "records", f"record {number}")
    clock.now_s += 10.0
    limited.write(logging.WARNING, "records", "record 9")
    assert caplog.messages == [
        *(f"record {number}" for number in range(3)),
        "record 9 (and 2 more such messages in the last 10 s)",
    ]
