"""What a restart finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from migration_svc.journal import Closed, Journal, JournalDamaged, Opened


def opened(migration_id: str) -> Opened:
    return Opened(
        migration_id=migration_id,
        request_id="r",
        source_instance_id="a",
        target_instance_id="b",
        target_address="127.0.0.1:1",
        epoch=1,
        reason="test",
        policy="none",
        opened_s=1.0,
    )


def test_what_was_not_closed_is_left_open(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    for name in ("one", "two", "three"):
        journal.write(opened(name))
    journal.write(Closed(migration_id="two", committed=True))
    journal.close()
    again = Journal(path)
    assert [entry.migration_id for entry in again.left_open] == ["one", "three"]
    for entry in again.left_open:
        again.write(Closed(migration_id=entry.migration_id, committed=False))
    again.close()
    assert Journal(path).left_open == []


def test_a_line_cut_short_by_a_kill_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.write(opened("one"))
    journal.close()
    with path.open("ab") as file:
        file.write(b'{"type":"closed","migra')
    assert [entry.migration_id for entry in Journal(path).left_open] == ["one"]


def test_something_else_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text("dear diary\nnothing happened\n")
    with pytest.raises(JournalDamaged, match="line 1"):
        Journal(path)
    assert path.read_text().startswith("dear diary")


def test_no_file_no_memory() -> None:
    journal = Journal(None)
    journal.write(opened("one"))
    assert journal.left_open == []
    journal.close()


def test_it_does_not_grow_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, lines_max=10)
    journal.write(opened("stays"))
    sizes = set()
    for number in range(100):
        journal.write(opened(f"m{number}"))
        journal.write(Closed(migration_id=f"m{number}", committed=True))
        sizes.add(len(path.read_bytes().splitlines()))
    assert max(sizes) <= 10
    journal.write(opened("last"))
    journal.close()
    assert [entry.migration_id for entry in Journal(path).left_open] == ["stays", "last"]
