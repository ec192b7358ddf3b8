"""LineFile: a line is appended whole or an error is raised, and a torn line spoils no other."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from tailrace.files import LineFile
from tests.full_disk import files_end_at

LINE = b'{"a": 1}'


def test_lines_are_appended_to_an_existing_file(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for line in (b"one", b"two"):
        file = LineFile(path)
        file.append(line)
        file.close()
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_new_file_is_not_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    LineFile(path).close()
    assert stat.S_IMODE(path.stat().st_mode) & ~0o640 == 0


def test_a_file_may_be_shared_and_renamed(tmp_path: Path) -> None:
    first, second = LineFile(tmp_path / "lines"), LineFile(tmp_path / "lines")
    first.append(b"one")
    (tmp_path / "lines").rename(tmp_path / "renamed")
    second.append(b"two")
    first.append(b"three")
    assert (tmp_path / "renamed").read_bytes() == b"one\ntwo\nthree\n"
    first.close()
    second.close()


@pytest.mark.parametrize("room", range(1, len(LINE) + 1))
def test_a_line_is_written_whole_or_raises(tmp_path: Path, room: int) -> None:
    path = tmp_path / "lines"
    file = LineFile(path)
    file.append(b"before")
    with files_end_at(path.stat().st_size + room), pytest.raises(OSError) as raised:
        file.append(LINE)
    assert raised.value.errno == errno.ENOSPC
    file.append(b"after")
    file.append(b"last")
    file.close()
    assert path.read_bytes() == b"before\n" + LINE[:room] + b"\nafter\nlast\n"


def test_a_line_that_just_fits_is_written(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = LineFile(path)
    with files_end_at(len(LINE) + 1):
        file.append(LINE)
    file.append(LINE)
    file.close()
    assert path.read_bytes() == 2 * (LINE + b"\n")


def test_a_write_that_stored_nothing_leaves_no_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = LineFile(path)
    file.append(b"before")
    with files_end_at(path.stat().st_size), pytest.raises(OSError):
        file.append(LINE)
    file.append(b"after")
    file.close()
    assert path.read_bytes() == b"before\nafter\n"


def test_a_line_follows_several_torn_ones(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = LineFile(path)
    for room in (3, 4):
        with files_end_at(path.stat().st_size + room), pytest.raises(OSError):
            file.append(LINE)
    file.append(b"after")
    file.close()
    assert path.read_bytes() == LINE[:3] + b"\n" + LINE[:3] + b"\nafter\n"


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LineFile(tmp_path / "none" / "lines")
    assert os.listdir(tmp_path) == []
