"""What the ranks of an engine share in /dev/shm and the temporary folder; it outlives ranks that die.

Python and vLLM choose these names, and give them to nobody; but a process has mapped only those of its own
engine. So they are read from the ranks' memory maps while these live, and recorded beside them for the case
that the worker is killed with all of its ranks: the next worker of the same user then removes them. The file
of the rendezvous is recorded, too, and sockets are in a folder of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import multiprocessing
import os
import re
import stat
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator
from itertools import islice
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Final, TextIO

from tailrace.service.private_folder import private_folder
from tailrace.service.sockets import unix_path

log = logging.getLogger(__name__)

_SHARED: Final = Path("/dev/shm")
# Python's shared memory (vLLM's message queues), and that of vLLM's ranks on a CPU.
_PYTHONS: Final = re.compile(r"psm_[0-9a-f]+")
_OF_RANKS: Final = re.compile(r"psm_[0-9a-f]+|[^/]+-cpushm[^/]*")
# The file by which the ranks of an engine on one machine rendezvous; an engine with one rank has it, too.
_MEETING: Final = re.compile(r"vllm_dist_[0-9a-f]+")
_MAPS_FIELDS: Final = 6
# Start of a record's name, and what is read of each, and of how many.
_RECORD: Final = "tailrace-ranks-"
_RECORD_BYTES_MAX: Final = 64 << 10
_RECORDS_MAX: Final = 1_024

Names = dict[str, int]
"""Names in /dev/shm or of a rendezvous, and the inode of each: a name may be used again, by others."""


def names_of(processes: Iterable[int]) -> Names:
    """Return the names that the ranks of an engine share, from the memory maps of these processes of it."""
    names: Names = {}
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/maps").read_text().splitlines():
                fields = line.split(maxsplit=_MAPS_FIELDS - 1)
                folder, _, name = fields[-1].rpartition("/")
                if len(fields) == _MAPS_FIELDS and folder == str(_SHARED) and _OF_RANKS.fullmatch(name):
                    names[name] = int(fields[4])
    return names


def remove(names: Names, tracked: bool = True) -> None:
    """Remove names that no rank needs any more; processes that have them mapped keep the memory.

    `tracked`: Python's resource tracker of this process knows them, and is told.
    """
    for name, inode in names.items():
        path = _path(name)
        try:
            if path.stat().st_ino != inode:
                continue
            path.unlink()
        except OSError:
            # Gone, or not ours to remove.
            continue
        log.info("removed what a rank that is gone has left: %s", path)
        if tracked and _PYTHONS.fullmatch(name):
            resource_tracker.unregister(f"/{name}", "shared_memory")


def meeting_file(name: str) -> Names:
    """Return the file of the ranks' rendezvous; nothing if vLLM used another rendezvous."""
    with contextlib.suppress(OSError):
        if _MEETING.fullmatch(name):
            return {name: _path(name).stat().st_ino}
    return {}


def remove_meeting(name: str) -> None:
    """Remove the file of the ranks' rendezvous. Does nothing if vLLM used another rendezvous."""
    if _MEETING.fullmatch(name):
        with contextlib.suppress(OSError):
            _path(name).unlink()


def _path(name: str) -> Path:
    return (Path(tempfile.gettempdir()) if _MEETING.fullmatch(name) else _SHARED) / name


class Record:
    """The names of one engine, kept in /dev/shm: they live as long as what they name.

    The file is locked for as long as this process lives: an unlocked one was left behind. Locks also count
    between containers that share /dev/shm, which do not see each other's processes.
    """

    def __init__(self) -> None:
        self._path = _SHARED / f"{_RECORD}{uuid.uuid4().hex}"
        self._file: TextIO | None = None

    def write(self, names: Names) -> None:
        """Record these names, if there are any."""
        if not names:
            return
        # Locked before it can be found.
        unfinished = self._path.with_name(f".{self._path.name}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._file = open(os.open(unfinished, flags, 0o600), "w")  # noqa: SIM115 - `clear` closes it
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.writelines(f"{inode} {name}\n" for name, inode in names.items())
            self._file.flush()
            unfinished.rename(self._path)
        except OSError as error:
            log.warning("%s: %s; what killed ranks leave will stay", self._path, error.strerror)
            with contextlib.suppress(OSError):
                unfinished.unlink()

    def clear(self) -> None:
        """Forget what is recorded."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            # What a full disk did not take is written again.
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def remove_left_behind() -> None:
    """Remove what engines of this user recorded whose processes are gone, and their records."""
    for path in islice(_SHARED.glob(f"{_RECORD}*"), _RECORDS_MAX):
        # It is gone, its process lives, or it is not ours to read.
        with contextlib.suppress(OSError):
            _remove_recorded(path)


def _remove_recorded(path: Path) -> None:
    if not stat.S_ISREG(path.lstat().st_mode):
        return
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags), "rb") as file:
        if os.fstat(file.fileno()).st_uid != os.getuid():
            return
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lines = file.read(_RECORD_BYTES_MAX).decode(errors="replace").splitlines()
        path.unlink()
    recorded = ((name, inode) for inode, _, name in (line.partition(" ") for line in lines))
    names = {
        name: int(inode)
        for name, inode in recorded
        if inode.isdecimal() and (_OF_RANKS.fullmatch(name) or _MEETING.fullmatch(name))
    }
    remove(names, tracked=False)


SOCKETS: Final = "VLLM_RPC_BASE_PATH"
"""Environment variable that holds the folder of the ranks' Unix sockets, vLLM's and ours."""


@contextlib.contextmanager
def private_sockets() -> Iterator[None]:
    """Have an engine make its sockets in a folder of this process, unless the environment names one."""
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(private_folder("worker"))
            # In a temporary folder with a long path, vLLM's sockets stay outside: their paths would be too
            # long.
            unix_path(folder, str(uuid.uuid4()))
        except OSError as error:
            log.info("sockets of ranks are not in a folder of their own: %s", error)
        else:
            # One that is gone was this process's own before it ran itself again.
            if not os.path.isdir(os.environ.get(SOCKETS, "")):
                os.environ[SOCKETS] = str(folder)
                stack.callback(os.environ.pop, SOCKETS)
        yield


# End a rank whose worker dies before the rank serves.
#
# vLLM's ranks watch their parent only once the model is loaded. Until then an orphaned rank goes on: it waits
# in the rendezvous for ranks that nobody will start, half an hour by default, or loads a model and holds
# device memory meanwhile. Once the model is loaded the rank's agent (rank_agent.py) takes over, as it has to
# clean up first.

WORKER_PID: Final = "TAILRACE_WORKER_PID"
"""Environment variable that holds the process id of the ranks' worker."""


class OrphanWatch:
    """End this process with status 1 when its worker dies, if it is a rank, until `stop`.

    It follows the interpreter's own record of its parent (`multiprocessing.parent_process`), because the
    kernel's PR_SET_PDEATHSIG also fires when the spawning *thread* ends.
    """

    def __init__(self) -> None:
        self._stopped = False
        parent = multiprocessing.parent_process()
        if parent is not None and os.environ.get(WORKER_PID, str(os.getpid())) != str(os.getpid()):
            threading.Thread(
                target=self._watch, args=(parent.sentinel,), name="tailrace-orphan", daemon=True
            ).start()

    def stop(self) -> None:
        """Stop watching: from now on the rank's agent does."""
        self._stopped = True

    def _watch(self, sentinel: int) -> None:
        connection.wait([sentinel])
        if not self._stopped:
            remove(names_of([os.getpid()]))
            # The main thread waits in native code, which an exception would not interrupt.
            os._exit(1)
