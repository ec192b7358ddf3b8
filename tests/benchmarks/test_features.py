"""When a row of `make test-features` is right, and what its file keeps."""

from __future__ import annotations

import dataclasses

from benchmarks.features.rows import Row, as_json, from_json

RIGHT = Row("a feature", "greedy", streams=3, equal=3, live=6, moved_twice=3)


def test_every_stream_is_equal_and_was_moved_twice() -> None:
    assert RIGHT.right
    assert not dataclasses.replace(RIGHT, equal=2, different=1).right
    assert not dataclasses.replace(RIGHT, moved_twice=2).right
    assert not Row("a feature", "greedy").right


def test_what_may_differ_is_moved_all_the_same() -> None:
    other = dataclasses.replace(RIGHT, equal=2, different=1, may_differ=True)
    assert other.right
    assert not dataclasses.replace(other, moved_twice=2).right


def test_what_never_moves_is_equal() -> None:
    row = Row("embedding", "-", streams=3, equal=3, stays=True)
    assert row.right
    assert not dataclasses.replace(row, equal=2, different=1).right


def test_a_later_run_finds_what_was_kept() -> None:
    row = dataclasses.replace(RIGHT, way_reasons={"a draft's state does not travel"})
    assert from_json(as_json([row])) == [row]
