"""A folder for the files of one process. The next one of its kind removes what a killed one has left."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from zlib import crc32


@contextmanager
def private_folder(name: str) -> Iterator[Path]:
    """Make a folder, and remove it at the end; remove those of this name and user that killed processes left.

    A process holds a lock on its folder, which ends with it. Raise OSError.
    """
    made = Path(tempfile.mkdtemp(prefix="tailrace-new-"))
    descriptor = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some file systems have no locks: there nothing is removed either.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Under its name only now: another process takes one without a lock for left. With the host in it: on
        # a shared file system, locks may be those of one host.
        prefix = f"tailrace-{name}.{crc32(socket.gethostname().encode()):08x}."
        folder = made.rename(made.with_name(made.name.replace("tailrace-new-", prefix, 1)))
        try:
            _remove_left(folder.parent, prefix)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _remove_left(parent: Path, prefix: str) -> None:
    for folder in parent.glob(f"{prefix}*"):
        # It may vanish, or be another user's.
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
