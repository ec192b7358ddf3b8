"""Replace a file so that nobody ever sees half of it; append lines so that a full disk cuts one at most; tell
whether a file has changed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

Stamp = tuple[int, int, int]


def file_stamp(path: Path) -> Stamp:
    """Return what is another one once the file has been written or replaced; zeros if that is not known."""
    try:
        status = path.stat()
    except OSError:
        return (0, 0, 0)
    return status.st_mtime_ns, status.st_ino, status.st_size


def replace_file(path: Path, content: bytes, mode: int) -> None:
    """Replace the file atomically and durably; it keeps its owner, group, mode and access lists.

    `mode`: of a new file. One that root creates belongs to the owner of its folder. Raise OSError: the file
    is then as it was.
    """
    with replacement(path, mode) as file:
        file.write(content)


@contextmanager
def replacement(path: Path, mode: int) -> Iterator[BinaryIO]:
    """Yield a new version of the file, which replaces it at the end of the block; see replace_file.

    After an exception, an OSError of its own included, the file is as it was.
    """
    # The file behind a symbolic link is replaced, not the link.
    path = path.resolve()
    partial = new_version(path, mode)
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def new_version(path: Path, mode: int) -> Path:
    """Create an empty file beside `path` with its rights, to be renamed to it; see replace_file for `mode`.

    Raise OSError.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    # Nobody else may open it before it has its final owner and mode.
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
            old = path.stat()
        except FileNotFoundError:
            if os.geteuid() == 0:
                folder = path.parent.stat()
                os.fchown(descriptor, folder.st_uid, folder.st_gid)
            os.fchmod(descriptor, mode)
        else:
            _keep_owner(descriptor, old, path)
            os.fchmod(descriptor, old.st_mode & 0o7777)
            _copy_attributes(path, descriptor)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return partial


def _keep_owner(descriptor: int, old: os.stat_result, path: Path) -> None:
    new = os.fstat(descriptor)
    if (new.st_uid, new.st_gid) == (old.st_uid, old.st_gid):
        return
    try:
        os.fchown(descriptor, old.st_uid, old.st_gid)
    except PermissionError as error:
        reason = f"only its owner (user {old.st_uid}) or root may replace it"
        raise PermissionError(errno.EPERM, reason, str(path)) from error


def _copy_attributes(path: Path, descriptor: int) -> None:
    """Copy the extended attributes, which hold access control lists, where the file system has any."""
    try:
        names = os.listxattr(path)
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.ENOSYS):
            return
        raise
    for name in names:
        try:
            os.setxattr(descriptor, name, os.getxattr(path, name))
        except OSError as error:
            # Labels such as security.selinux, which the system sets by itself.
            if name.startswith("system.posix_acl") or error.errno not in (errno.EPERM, errno.ENOTSUP):
                raise


class LineFile:
    """Append lines to a file, each in a single write, because several processes may share the file."""

    def __init__(self, path: Path) -> None:
        """Open the file for appending; create it with mode 0o640 if it does not exist. Raise OSError."""
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        # True while the file ends in a partially written line.
        self._torn = False

    def append(self, line: bytes) -> None:
        """Append `line`, which has no line break, and a line break. It is in the file when this returns; a
        crash of the machine may lose it.

        Raise OSError if the line was not written completely: ENOSPC if a part of it was. The next call then
        starts a new line.
        """
        whole = (b"\n" if self._torn else b"") + line + b"\n"
        # On a disk that becomes full, os.write may store a part and report no error.
        if os.write(self._fd, whole) < len(whole):
            self._torn = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn = False

    def close(self) -> None:
        """Close the file; it must not be used afterwards."""
        os.close(self._fd)
