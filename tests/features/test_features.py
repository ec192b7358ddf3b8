"""The verdict on a row of `make test-features`, and the file of results."""

from __future__ import annotations

import dataclasses

from tests.features.rows import Row, as_json, from_json

PASSED = Row("a feature", "greedy", streams=3, equal=3, live=6, moved_twice=3)


def test_every_stream_must_be_equal_and_migrated_twice() -> None:
    assert PASSED.passed
    assert not dataclasses.replace(PASSED, equal=2, different=1).passed
    assert not dataclasses.replace(PASSED, moved_twice=2).passed
    assert not Row("a feature", "greedy").passed


def test_streams_that_may_differ_must_be_migrated() -> None:
    other = dataclasses.replace(PASSED, equal=2, different=1, may_differ=True)
    assert other.passed
    assert not dataclasses.replace(other, moved_twice=2).passed


def test_requests_that_are_never_migrated_must_be_equal() -> None:
    row = Row("embedding", "-", streams=3, equal=3, stays=True)
    assert row.passed
    assert not dataclasses.replace(row, equal=2, different=1).passed


def test_a_later_run_reads_the_saved_rows() -> None:
    row = dataclasses.replace(PASSED, way_reasons={"a draft's state does not travel"})
    assert from_json(as_json([row])) == [row]
