"""The verdict on a row of `make test-clients`, the file of results, and the scripted model's pieces."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest

from tests.clients.__main__ import main
from tests.clients.moving import Disturbed
from tests.clients.rows import Outcome, Row
from tests.clients.scripted import make_pieces


def complete(moved: Outcome, kills: int = 1, moves: int = 2) -> Row:
    row = Row("a client", "1.0", plain=Outcome(2, {"b": "refused"}, {"a": "text"}))
    row.add(moved, Disturbed(Counter({"request": moves}), kills=kills))
    return row


def test_equal_answers_and_errors_pass() -> None:
    assert complete(Outcome(2, {"b": "refused"}, {"a": "text"})).passed


@pytest.mark.parametrize(
    ("moved", "what"),
    [
        (Outcome(2, {"b": "refused"}, {"a": "texts"}), "a"),
        (Outcome(2, {"b": "another"}, {"a": "text"}), "b"),
        (Outcome(2, {"a": "lost", "b": "refused"}), "a"),
        (Outcome(3, {"b": "refused"}, {"a": "text"}), "requests"),
    ],
)
def test_a_difference_is_named(moved: Outcome, what: str) -> None:
    row = complete(moved)
    assert not row.passed
    assert list(row.differences()) == [what]


def test_only_a_known_difference_passes() -> None:
    row = complete(Outcome(2, {"b": "another"}, {"a": "text"}))
    assert not dataclasses.replace(row, known=["a"]).passed
    assert dataclasses.replace(row, known=["b"]).passed


def test_a_run_without_moves_or_kill_does_not_pass() -> None:
    equal = Outcome(2, {"b": "refused"}, {"a": "text"})
    assert not complete(equal, kills=0).passed
    assert not complete(equal, moves=0).passed
    assert not dataclasses.replace(complete(equal), failed="it ended").passed
    assert not Row("a client", "1.0").passed


def test_a_later_run_reads_the_saved_rows() -> None:
    row = complete(Outcome(2, {}, {"a": "texts"}))
    assert Row.from_json(json.loads(json.dumps(row.as_json()))) == row
    assert Row.from_json(Row("a client", "1.0", failed="no").as_json()) == Row("a client", "1.0", failed="no")


def test_no_piece_of_a_script_occurs_twice() -> None:
    pieces = [piece for script in make_pieces().values() for piece in script]
    assert len(set(pieces)) == len(pieces)


@pytest.mark.slow
@pytest.mark.vllm
def test_openai_client_sees_no_difference() -> None:
    assert main(["openai"]) == 0
