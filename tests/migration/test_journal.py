"""The migration journal: which migrations a restart finds unfinished."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from migration_svc.journal import Journal, JournalClosed, JournalDamaged, JournalOpened
from tailrace.v1.migration_pb2 import MigrationRecord
from tests.full_disk import files_end_at


def opened(migration_id: str) -> JournalOpened:
    record = MigrationRecord(
        migration_id=migration_id,
        request_id="r",
        source_instance_id="a",
        target_instance_id="b",
        epoch=1,
        reason="test",
        policy="none",
        opened_s=1.0,
    )
    return JournalOpened(record=record, target_address="127.0.0.1:1")


def unfinished(journal: Journal) -> list[str]:
    return [entry.record.migration_id for entry in journal.unfinished]


def test_unclosed_migrations_are_unfinished_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    for name in ("one", "two", "three"):
        journal.write(opened(name))
    journal.write(JournalClosed(migration_id="two"))
    journal.close()
    again = Journal(path)
    assert again.unfinished == [opened("one"), opened("three")]
    for name in ("one", "three"):
        again.write(JournalClosed(migration_id=name))
    again.close()
    assert Journal(path).unfinished == []


def test_line_truncated_by_a_kill_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.write(opened("one"))
    journal.close()
    with path.open("ab") as file:
        file.write(b'{"type":"closed","migra')
    assert unfinished(Journal(path)) == ["one"]


def test_line_whose_record_cannot_be_read_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.write(opened("one"))
    journal.write(opened("two"))
    journal.close()
    path.write_bytes(path.read_bytes().replace(b'"epoch":1', b'"epoch":"high"', 1))
    assert unfinished(Journal(path)) == ["two"]


def test_lines_truncated_by_a_full_disk_are_skipped(tmp_path: Path) -> None:
    # The next line begins right after the truncated one.
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.write(opened("one"))
    journal.close()
    line = path.read_bytes()
    path.write_bytes(line + line[:30] + line.replace(b"one", b"two") + line.replace(b"one", b"three"))
    assert unfinished(Journal(path)) == ["one", "three"]


@pytest.mark.parametrize("room", [0, 1, 40])
def test_journal_recovers_from_a_full_disk(
    tmp_path: Path, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.write(opened("before"))
    with files_end_at(path.stat().st_size + room):
        journal.write(opened("within"))
        journal.write(JournalClosed(migration_id="before"))
    assert sum("cannot be written" in record.message for record in caplog.records) == 1
    journal.write(opened("after"))
    journal.close()
    assert unfinished(Journal(path)) == ["within", "after"]


def test_start_on_a_full_disk_keeps_unfinished_migrations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.write(opened("one"))
    journal.close()

    def disk_full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", disk_full)
        journal = Journal(path)
        journal.write(opened("two"))
    assert unfinished(journal) == ["one"]
    journal.write(opened("three"))
    journal.close()
    assert unfinished(Journal(path)) == ["one", "two", "three"]


def test_other_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text("not a journal\nbut another file\n")
    with pytest.raises(JournalDamaged, match="line 1"):
        Journal(path)
    assert path.read_text().startswith("not a journal")


def test_journal_without_a_file_keeps_nothing() -> None:
    journal = Journal(None)
    journal.write(opened("one"))
    assert journal.unfinished == []
    journal.close()


def test_journal_size_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, lines_max=10)
    journal.write(opened("stays"))
    sizes = set()
    for number in range(100):
        journal.write(opened(f"m{number}"))
        journal.write(JournalClosed(migration_id=f"m{number}"))
        sizes.add(len(path.read_bytes().splitlines()))
    assert max(sizes) <= 10
    journal.write(opened("last"))
    journal.close()
    assert unfinished(Journal(path)) == ["stays", "last"]
