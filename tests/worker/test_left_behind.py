"""Shared memory of ranks that were killed is removed, and nobody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from worker_agent.parallel import rank_leftovers
from worker_agent.parallel.rank_leftovers import (
    SOCKETS,
    names_of,
    private_sockets,
    remove,
    remove_left_behind,
)

SHARED = Path("/dev/shm")
# As a rank of a vLLM engine on a CPU: a message queue, and memory of the ranks' own communicator.
_RANK = """
import mmap, os, sys
from multiprocessing import shared_memory
queue = shared_memory.SharedMemory(create=True, size=4096)
file = os.open(f"/dev/shm/{sys.argv[1]}-tp:0-[0-1]-cpushm_0", os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 4096)
memory = mmap.mmap(file, 4096)
print(queue.name, flush=True)
sys.stdin.read()
"""


@contextmanager
def rank() -> Iterator[tuple[subprocess.Popen[str], set[str]]]:
    """Yield a process of a session of its own, with its resource tracker, and the names that it shares."""
    ident = f"vllm_dist_{uuid.uuid4().hex}"
    with subprocess.Popen(
        [sys.executable, "-c", _RANK, ident],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        names = {process.stdout.readline().strip(), f"{ident}-tp:0-[0-1]-cpushm_0"}
        try:
            yield process, names
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            for name in names:
                (SHARED / name).unlink(missing_ok=True)


def existing(names: set[str]) -> set[str]:
    return {name for name in names if (SHARED / name).exists()}


# As a worker: it records what a rank shares, and lives.
_WORKER = """
import sys
from worker_agent.parallel.rank_leftovers import Record, names_of
record = Record()
record.write(names_of([int(sys.argv[1])]))
print("recorded", flush=True)
sys.stdin.read()
"""


def test_the_next_worker_removes_what_killed_ranks_left() -> None:
    with rank() as (process, names), rank() as (other, others):
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", _WORKER, str(each.pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for each in (process, other)
        ]
        try:
            for worker in workers:
                assert worker.stdout is not None and worker.stdout.readline().strip()
            # With its resource tracker, as when a container is killed.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            # A worker that lives removes what its ranks share itself.
            remove_left_behind()
            assert existing(names) == names
            workers[0].kill()
            workers[0].wait()
            remove_left_behind()
            assert existing(names) == set()
            assert existing(others) == others
            assert other.poll() is None
            remove_left_behind()
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()
            remove_left_behind()


def test_only_what_the_processes_have_mapped_is_named() -> None:
    with rank() as (process, names), rank():
        found = names_of([process.pid, 0, 2**22 + 1])
        assert found == {name: (SHARED / name).stat().st_ino for name in names}


def test_name_that_another_process_uses_by_now_is_not_removed() -> None:
    with rank() as (_, names):
        remove(dict.fromkeys(names, 1), tracked=False)
        assert existing(names) == names


def test_removed_memory_stays_usable_and_is_not_removed_twice(capfd: pytest.CaptureFixture[str]) -> None:
    """Python's resource tracker forgets the name, as it would otherwise report it as leaked."""
    memory = shared_memory.SharedMemory(create=True, size=4096)
    names = {name: inode for name, inode in names_of([os.getpid()]).items() if name == memory.name}
    assert names
    remove(names)
    assert existing(set(names)) == set()
    assert memory.buf is not None
    memory.buf[0] = 1
    remove(names)
    memory.close()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "lines", [b"", b"x psm_0\n", b"1 ../../etc/passwd\n", b"\xff\xfe 1", b"1 other\n" * 99_999]
)
def test_unreadable_record_is_forgotten(lines: bytes) -> None:
    path = SHARED / f"tailrace-ranks-{uuid.uuid4().hex}"
    path.write_bytes(lines)
    remove_left_behind()
    assert not path.exists()


def test_what_is_no_record_is_left_alone(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("1 psm_0\n")
    link, pipe, folder = (SHARED / f"tailrace-ranks-{uuid.uuid4().hex}" for _ in range(3))
    try:
        link.symlink_to(elsewhere)
        os.mkfifo(pipe)
        folder.mkdir()
        remove_left_behind()
        assert elsewhere.read_text() == "1 psm_0\n"
        assert link.is_symlink() and pipe.is_fifo() and folder.is_dir()
    finally:
        link.unlink()
        pipe.unlink()
        folder.rmdir()


# As a worker with one rank, and with a message queue: killed, or ended.
_SOCKETS = """
import os, sys, uuid
from pathlib import Path
from worker_agent.parallel import rank_leftovers
from worker_agent.parallel.rank_leftovers import Record, meeting_file, private_sockets
from worker_agent.parallel.rank_links import RankLinks
rank_leftovers._SHARED = Path(os.environ["RECORDS"])
meeting = f"vllm_dist_{uuid.uuid4().hex}"
open(os.path.join(os.environ["TMPDIR"], meeting), "w").close()
Record().write(meeting_file(meeting))
with private_sockets():
    from vllm.utils.network_utils import get_open_zmq_ipc_path
    import zmq
    socket = zmq.Context().socket(zmq.PUB)
    socket.bind(get_open_zmq_ipc_path())
    links = RankLinks(2, print)
    print("made", flush=True)
    sys.stdin.read()
"""


@pytest.mark.vllm
def test_what_a_killed_worker_left_in_the_temporary_folder_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm", reason="the vLLM engine is not installed")
    monkeypatch.delenv(SOCKETS, raising=False)
    # Not where workers of other tests look for records.
    monkeypatch.setattr(rank_leftovers, "_SHARED", tmp_path)
    # With a short path, as vLLM's sockets need.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        monkeypatch.setattr(tempfile, "tempdir", name)
        with subprocess.Popen(
            [sys.executable, "-c", _SOCKETS],
            env=os.environ | {"TMPDIR": name, "RECORDS": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == b"made\n"
            made = {path.name.partition(".")[0].partition("_")[0] for path in folder.iterdir()}
            process.kill()
        assert made == {"tailrace-worker", "vllm"}
        # As the next worker, or as this one if it runs itself again.
        monkeypatch.setenv(SOCKETS, str(next(folder.glob("tailrace-worker*"))))
        remove_left_behind()
        with private_sockets():
            assert [*folder.iterdir()] == [Path(os.environ[SOCKETS])]
        assert [*folder.iterdir()] == []
    assert SOCKETS not in os.environ


def test_sockets_stay_outside_a_folder_that_is_too_deep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SOCKETS, raising=False)
    deep = tmp_path / ("a" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with private_sockets():
        assert SOCKETS not in os.environ
