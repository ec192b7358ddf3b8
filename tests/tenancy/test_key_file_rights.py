"""Commands that root runs leave the key file as readable as it was, and a front end notices if it is not."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from tailrace.cli.main import main
from tailrace.files import replace_file
from tailrace.tenancy.file import KeyFile, read_keys, readers_problem

SERVICE_USER = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes owners")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["keys", *arguments])
    assert result.exit_code == 0, result.stderr
    return result.stdout.strip()


@contextmanager
def as_service_user() -> Iterator[None]:
    """Access files as an unprivileged user."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(SERVICE_USER)
    os.seteuid(SERVICE_USER)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    # Others may enter the folders, as /etc/tailrace.
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and not folder.stat().st_mode & stat.S_IXOTH:
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
    return tmp_path / "keys.json"


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 2.0
        return self.now_s


@needs_root
def test_revocation_by_root_reaches_an_unprivileged_front_end(file: Path) -> None:
    """The documented installation: root:tailrace, mode 640, and every command run with sudo."""
    key = run("make", "a", "--file", str(file))
    os.chown(file, 0, SERVICE_USER)
    with as_service_user():
        followed = KeyFile(file, Clock())
        assert followed.index().holder(key) is not None
    later = run("make", "b", "--file", str(file))
    with as_service_user():
        assert followed.index().holder(later) is not None
    run("revoke", key.split("-")[2], "--file", str(file))
    with as_service_user():
        assert followed.index().holder(key) is None and followed.index().holder(later) is not None
        assert followed.problem() == ""
    status = file.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (0, SERVICE_USER, 0o640)


@needs_root
def test_unreadable_file_is_retried_until_it_is_read(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = run("make", "a", "--file", str(file))
    os.chown(file, SERVICE_USER, SERVICE_USER)
    with as_service_user():
        followed = KeyFile(file, Clock())
    # A copy that root made, readable only by root.
    os.chown(file, 0, 0)
    run("revoke", key.split("-")[2], "--file", str(file))
    with as_service_user():
        for _ in range(3):
            assert followed.index().holder(key) is not None
            assert "Permission denied" in followed.problem()
    assert caplog.text.count("the previous keys stay in force") == 1
    # Becomes readable without a change of its content, size or time.
    os.chown(file, 0, SERVICE_USER)
    with as_service_user():
        assert followed.problem() == "" and followed.index().holder(key) is None


def test_transient_read_error_is_retried(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = run("make", "a", "--file", str(file))
    followed = KeyFile(file, Clock())
    run("revoke", key.split("-")[2], "--file", str(file))
    with monkeypatch.context() as patched:

        def fail(path: Path) -> bytes:
            raise OSError(5, "Input/output error", str(path))

        patched.setattr("tailrace.tenancy.file.read_regular", fail)
        assert followed.index().holder(key) is not None
    assert followed.index().holder(key) is None


@needs_root
def test_list_says_that_only_root_can_read_the_file(file: Path) -> None:
    made = CliRunner().invoke(main, ["keys", "make", "a", "--file", str(file)])
    listed = CliRunner().invoke(main, ["keys", "list", "--file", str(file)])
    for result in (made, listed):
        assert "only root can read it" in result.stderr
    os.chown(file, 0, SERVICE_USER)
    assert CliRunner().invoke(main, ["keys", "list", "--file", str(file)]).stderr == ""
    file.chmod(0o600)
    assert "only root can read it" in readers_problem(file)


@needs_root
def test_new_file_belongs_to_the_owner_of_its_folder(file: Path) -> None:
    os.chown(file.parent, SERVICE_USER, SERVICE_USER)
    run("make", "a", "--file", str(file))
    assert (file.stat().st_uid, file.stat().st_gid) == (SERVICE_USER, SERVICE_USER)


@needs_root
def test_replacement_that_would_change_the_owner_is_refused(file: Path) -> None:
    run("make", "a", "--file", str(file))
    file.chmod(0o644)
    file.parent.chmod(0o777)
    with as_service_user(), pytest.raises(PermissionError, match="only its owner"):
        replace_file(file, b"", 0o640)
    assert read_keys(file).keys and [path.name for path in file.parent.iterdir()] == [file.name]


def test_symbolic_link_stays_and_its_target_is_replaced(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    file.symlink_to(target / "keys.json")
    run("make", "a", "--file", str(file))
    assert file.is_symlink() and read_keys(target / "keys.json").tenant("a")


def test_access_attributes_are_kept(file: Path) -> None:
    run("make", "a", "--file", str(file))
    try:
        os.setxattr(file, "user.note", b"kept")
    except OSError:
        pytest.skip("no extended attributes here")
    run("make", "b", "--file", str(file))
    assert os.getxattr(file, "user.note") == b"kept"
