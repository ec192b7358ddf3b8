"""The run folder of a local cluster, and the state file in it that says what runs."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from tailrace.local.identity import Identity
from tailrace.local.plan import PartSpec

RUN_DIR_ENV: Final = "TAILRACE_RUN_DIR"
_DEFAULT: Final = ".run"
_FILE: Final = "state.json"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the cluster."""

    name: str
    tier: str
    identity: Identity
    log: str
    # What it was started with; None: by a version that did not keep it.
    spec: PartSpec | None = None


class RunState(msgspec.Struct, kw_only=True):
    """What `tailrace up` started."""

    parts: list[Part] = []
    # Where the admin API is, HOST:PORT[,..]; empty until the scheduler is ready.
    admin: str = ""
    # Where users reach the front ends; empty until everything is ready.
    http: str = ""
    # Name that clients give as `model`.
    model: str = ""
    # Whether it is the model that Tailrace ships, whose answers the examples know.
    tiny: bool = False
    # Instances; a process may hold several simulated ones.
    workers: int = 0
    etcd: str = ""
    # Folder of the certificates; empty: the cluster asks for none.
    certificates: str = ""
    # What every part's environment has besides that of `tailrace up`.
    environment: dict[str, str] = {}

    @property
    def ready(self) -> bool:
        """`tailrace up` came to its end."""
        return bool(self.http)


class RunFolderBusy(RuntimeError):
    """Another `tailrace up` or `tailrace down` works in the run folder."""


class RunFolderUnusable(RuntimeError):
    """The run folder cannot be used, or its state file is damaged; the message says which."""


class RunFolder:
    """`.run/` in the working directory, or TAILRACE_RUN_DIR: state file, logs, etcd's data."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def default() -> RunFolder:
        """The run folder of the working directory."""
        return RunFolder(Path(os.environ.get(RUN_DIR_ENV) or _DEFAULT).absolute())

    @property
    def logs(self) -> Path:
        """Where each part's log is."""
        return self.path / "logs"

    @property
    def data(self) -> Path:
        """What the parts keep on disk."""
        return self.path / "data"

    def read(self) -> RunState | None:
        """The state, or None when nothing was started (or everything was stopped).

        Raises RunFolderUnusable.
        """
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
        """Replace the state file in one step."""
        partial = self.path / (_FILE + ".partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
        partial.replace(self.path / _FILE)

    def forget(self) -> None:
        """Remove the state file."""
        (self.path / _FILE).unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder (made if needed) for the block.

        Raises RunFolderBusy when another process does, RunFolderUnusable when it cannot be made or written.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("w")
        except OSError as error:
            raise RunFolderUnusable(f"{self.path}: {error.strerror} ({RUN_DIR_ENV} names another)") from error
        with lock as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunFolderBusy(f"another tailrace up or down is running in {self.path}") from None
            yield


def find_state() -> RunState | None:
    """The state of the local cluster that the working directory or one above it holds, or None.

    Raises RunFolderUnusable.
    """
    if os.environ.get(RUN_DIR_ENV):
        return RunFolder.default().read()
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (state := RunFolder(folder / _DEFAULT).read()) is not None:
            return state
    return None
