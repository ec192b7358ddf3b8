"""The run folder of a local cluster, and its state file, which lists the running parts."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, Self

import msgspec

from tailrace.local.plan import PartSpec, ScaledModel, Tier


class Identity(msgspec.Struct, frozen=True):
    """A unique process: its pid, its start time in clock ticks since boot, and the id of that boot."""

    pid: int
    start_ticks: int
    boot_id: str

    def alive(self) -> bool:
        """Return whether this very process is running; a zombie is not."""
        stat = _stat(self.pid)
        return (
            stat is not None
            and stat.start_ticks == self.start_ticks
            and stat.state not in "ZX"
            and self.boot_id == _boot_id()
        )

    def session_members(self) -> list[int]:
        """Return the pids of running processes in the session that this process leads or led.

        The kernel does not reuse a pid while a session has it as its id. So if another process has the pid
        now, the session is over, and any session with that id is another one.
        """
        if self.boot_id != _boot_id():
            return []
        leader = _stat(self.pid)
        if leader is not None and leader.start_ticks != self.start_ticks:
            return []
        return [stat.pid for stat in _all_stats() if stat.session == self.pid and stat.state not in "ZX"]


class _Stat(msgspec.Struct, frozen=True):
    pid: int
    state: str
    session: int
    start_ticks: int


def identify(pid: int) -> Identity:
    """Return the identity of a running process. Raise ProcessLookupError if there is none."""
    stat = _stat(pid)
    if stat is None:
        raise ProcessLookupError(pid)
    return Identity(pid, stat.start_ticks, _boot_id())


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> _Stat | None:
    """Read fields 3, 6 and 22 of /proc/<pid>/stat (proc_pid_stat(5)); return None if there is no process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name, in parentheses, may contain anything, so parse after the last parenthesis.
    fields = text.rpartition(")")[2].split()
    return _Stat(pid=pid, state=fields[0], session=int(fields[3]), start_ticks=int(fields[19]))


def _all_stats() -> Iterator[_Stat]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _stat(int(name))) is not None:
            yield stat


RUN_DIR_ENV: Final = "TAILRACE_RUN_DIR"
_DEFAULT: Final = ".run"
_FILE: Final = "state.json"
# etcd allocates 64 MB at once.
_ROOM_BYTES: Final = 100_000_000
# For how long the scaler holds the lock at most.
_SCALER_S: Final = 3.0
_POLL_S: Final = 0.05


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the cluster. `spec`: with which it was started."""

    identity: Identity
    log: str
    spec: PartSpec
    # Whether the scaler has told it to stop, and it hands over its work.
    leaving: bool = False

    @property
    def name(self) -> str:
        """Return its name."""
        return self.spec.name

    @property
    def tier(self) -> Tier:
        """Return its tier."""
        return self.spec.tier

    @property
    def place(self) -> int:
        """Return the number of its tier, in the order in which tiers start."""
        return [*Tier].index(self.tier)


class RunState(msgspec.Struct, kw_only=True):
    """The cluster that `tailrace up` started."""

    parts: list[Part] = []
    # Addresses of the admin API, HOST:PORT[,..]; empty until the scheduler is ready.
    admin: str = ""
    # Those of the cluster of each model, by the names that clients use.
    models: dict[str, str] = {}
    # URL of the front ends; empty until all parts are ready.
    http: str = ""
    # The model name that clients use.
    model: str = ""
    # Whether it is the shipped model, whose answers the examples check.
    tiny: bool = False
    # Whether the engines are simulated: their answers are letters, and short unless more are asked for.
    simulated: bool = False
    # Whether it has a chat template; a base model answers completions only.
    chat: bool = True
    # Whether the API wants a key that is not in the environment.
    asks_for_key: bool = False
    # The policy that was set at the start.
    policy: str = ""
    # Number of instances; a process may hold several simulated ones.
    workers: int = 0
    etcd: str = ""
    # The host of a fleet's file that this machine is; empty: the cluster is on this machine alone.
    host: str = ""
    # Folder of the certificates; empty: no TLS.
    certificates: str = ""
    # The command line with which it was started.
    given: list[str] = []
    # Where it was started; commands have paths relative to it.
    directory: str = ""
    # Environment of all parts, in addition to that of `tailrace up`.
    environment: dict[str, str] = {}
    # Models whose number of workers the scaler changes.
    scaled: list[ScaledModel] = []

    @property
    def staying(self) -> list[Part]:
        """Return the parts, without those that the scaler is stopping."""
        return [part for part in self.parts if not part.leaving]

    @property
    def admins(self) -> list[str]:
        """Return the addresses of the admin APIs of all clusters."""
        return [*dict.fromkeys([self.admin, *self.models.values()])]

    @property
    def ready(self) -> bool:
        """Return whether `tailrace up` has finished."""
        return bool(self.http)


class RunFolderBusy(RuntimeError):
    """Another command is using the run folder."""


class RunFolderUnusable(RuntimeError):
    """The run folder cannot be used, or its state file is damaged; the message says which."""

    @classmethod
    def of(cls, path: Path, error: OSError) -> Self:
        """Return the error of a folder that cannot be written."""
        return cls(f"{path}: {error.strerror} ({RUN_DIR_ENV} names another folder)")


class RunFolder:
    """`.run/` in the working directory, or TAILRACE_RUN_DIR: state file, logs, etcd's data."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def default() -> RunFolder:
        """Return the run folder of the working directory, or the one in TAILRACE_RUN_DIR."""
        return RunFolder(Path(os.environ.get(RUN_DIR_ENV) or _DEFAULT).absolute())

    @staticmethod
    def nearest() -> RunFolder:
        """Return the run folder of the cluster of the working directory or one of its parents, or the
        default."""
        default = RunFolder.default()
        if os.environ.get(RUN_DIR_ENV):
            return default
        here = Path.cwd()
        above = (RunFolder(folder / _DEFAULT) for folder in (here, *here.parents))
        return next((folder for folder in above if (folder.path / _FILE).exists()), default)

    @property
    def logs(self) -> Path:
        """Return the folder of the parts' logs."""
        return self.path / "logs"

    @property
    def data(self) -> Path:
        """Return the folder of the parts' data."""
        return self.path / "data"

    @property
    def kept(self) -> Path:
        """Return the folder of the data of a fleet's host, which `tailrace down` leaves there."""
        return self.path / "host"

    def read(self) -> RunState | None:
        """Return the state, or None if no cluster was started. Raise RunFolderUnusable."""
        file = self.path / _FILE
        try:
            return msgspec.json.decode(file.read_bytes(), type=RunState)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RunFolderUnusable(f"{file}: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise RunFolderUnusable(
                f"{file} is corrupt ({error}); kill the cluster's processes by hand and remove it"
            ) from error

    def write(self, state: RunState) -> None:
        """Replace the state file atomically. Raise RunFolderUnusable if it cannot be written, as on a full
        disk; the previous one stays."""
        partial = self.path / (_FILE + ".partial")
        content = msgspec.json.format(msgspec.json.encode(state)) + b"\n"
        try:
            partial.unlink(missing_ok=True)
            # The environment of a fleet.yaml may hold secrets, such as a token of a hub.
            partial.touch(0o600)
            partial.write_bytes(content)
            partial.replace(self.path / _FILE)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise RunFolderUnusable.of(self.path, error) from error

    def forget(self) -> None:
        """Remove the state file."""
        (self.path / _FILE).unlink(missing_ok=True)

    def require_room(self) -> None:
        """Raise RunFolderUnusable if its disk has no room for a cluster."""
        free = shutil.disk_usage(self.path).free
        if free < _ROOM_BYTES:
            raise RunFolderUnusable(
                f"{self.path}: {free / 1e6:.0f} MB free; a local cluster needs {_ROOM_BYTES / 1e6:.0f} MB "
                f"({RUN_DIR_ENV} names another folder)"
            )

    @contextmanager
    def locked(self, patience_s: float = _SCALER_S) -> Iterator[None]:
        """Hold the folder's lock, creating the folder if necessary.

        Raise RunFolderBusy if another process holds it for `patience_s`, RunFolderUnusable if the folder
        cannot be created or written.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("w")
        except OSError as error:
            raise RunFolderUnusable.of(self.path, error) from error
        with lock as file:
            deadline = time.monotonic() + patience_s
            while not _try_lock(file):
                if time.monotonic() >= deadline:
                    raise RunFolderBusy(
                        f"another command (tailrace up, down, restart, apply) is changing {self.path}"
                    )
                time.sleep(_POLL_S)
            yield


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def find_state() -> RunState | None:
    """Return the state of the local cluster of the working directory or one of its parents, or None.

    Raise RunFolderUnusable.
    """
    return RunFolder.nearest().read()


def none_here() -> str:
    """Return that no local cluster was found, and where it was looked for."""
    if os.environ.get(RUN_DIR_ENV):
        return f"no local cluster is running in {RunFolder.default().path} ({RUN_DIR_ENV})"
    return (
        f"no local cluster is running in {Path.cwd()} or above it; if there is one elsewhere, go there, or "
        f"set {RUN_DIR_ENV} to its {_DEFAULT} folder"
    )
