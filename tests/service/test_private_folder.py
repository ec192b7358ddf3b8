"""Folders of processes: those of killed ones are removed, and no other's."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tailrace.service.private_folder import private_folder
from tailrace.service.sockets import unix_path

HOLD = """
import sys, tempfile
from tailrace.service.private_folder import private_folder
tempfile.tempdir = sys.argv[1]
with private_folder("test") as folder:
    (folder / "socket").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_process_left_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other = tmp_path / "tailrace-testing.x"
    other.mkdir()
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        held = Path(process.stdout.readline().strip())
        try:
            with private_folder("test") as folder:
                assert (held / "socket").exists() and folder.stat().st_mode & 0o777 == 0o700
        finally:
            process.kill()
    assert held.exists() and not folder.exists()
    with private_folder("test") as folder:
        assert {*tmp_path.iterdir()} == {folder, other}
    assert [*tmp_path.iterdir()] == [other]


def test_a_folder_too_deep_for_sockets_is_named(tmp_path: Path) -> None:
    """Such as a batch system's TMPDIR."""
    assert unix_path(Path("/tmp"), "in") == "/tmp/in"
    with pytest.raises(OSError, match=r"aaa/in: too long for a socket, .* name a folder with a shorter path"):
        unix_path(tmp_path / ("a" * 100), "in")
