"""Memory that two processes of one host share, for chunks on their way between them.

UCX's shared-memory transports have no handler for a peer's failure: with error handling UCX does not use
them, and without it a peer that is killed under a transfer ends our process too. So between processes of one
host UCX carries the requests and headers, whose endpoint notices at once when the other end dies; the blocks'
bytes are written by the source where the target reads them. Memory outlives whoever dies, and what is read is
checked.

A segment is an anonymous file, sealed so that it never shrinks under who has it mapped. The target opens it
as /proc/PID/fd/FD, which the kernel lets only the same user do, in the same PID namespace.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

# process, file descriptor, size, inode
_NAME: Final = struct.Struct("<IIQQ")
NAME_BYTES: Final = _NAME.size
# Mappings of peers' segments, and segments of ours, that are kept for the next transfer: memory that was
# touched before costs no page faults.
_KEPT_MAX: Final = 4
_SHARED: Final = frozenset({"all", "sm", "shm", "mm", "posix", "sysv", "cma", "knem", "xpmem"})
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SegmentName:
    """How another process of this host finds a segment."""

    process: int
    descriptor: int
    size: int
    inode: int

    def encode(self) -> bytes:
        """As it goes over the wire."""
        return _NAME.pack(self.process, self.descriptor, self.size, self.inode)

    @classmethod
    def decode(cls, data: bytes) -> SegmentName | None:
        """None: there is no segment."""
        name = cls(*_NAME.unpack(data))
        return name if name.size else None


NO_SEGMENT: Final = bytes(NAME_BYTES)


class Segment:
    """Memory of ours."""

    def __init__(self, size: int) -> None:
        self._descriptor = os.memfd_create("tailrace-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, size)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.memory: Bytes = np.frombuffer(mmap.mmap(self._descriptor, size), np.uint8)
            inode = os.fstat(self._descriptor).st_ino
        except BaseException:
            os.close(self._descriptor)
            raise
        self.name = SegmentName(os.getpid(), self._descriptor, size, inode)

    def close(self) -> None:
        """Nobody can open it any more; the memory goes when the last of those that have it mapped does."""
        os.close(self._descriptor)


class Segments:
    """A process's segments, used again."""

    def __init__(self) -> None:
        self._free: list[Segment] = []

    def take(self, size: int) -> Segment:
        """A segment that nobody reads. Raises OSError."""
        for number, segment in enumerate(self._free):
            if segment.name.size == size:
                return self._free.pop(number)
        return Segment(size)

    def give_back(self, segment: Segment) -> None:
        """Nobody reads it any more."""
        self._free.append(segment)
        if len(self._free) > _KEPT_MAX:
            self._free.pop(0).close()

    def close(self) -> None:
        """Drop those that are kept."""
        while self._free:
            self._free.pop().close()


class Mappings:
    """Peers' segments, mapped in this process to be read."""

    def __init__(self) -> None:
        self._mapped: OrderedDict[SegmentName, Bytes] = OrderedDict()

    def map(self, name: SegmentName) -> Bytes:
        """Its memory. Raises OSError when it cannot be had, or is not what its name says."""
        if name in self._mapped:
            self._mapped.move_to_end(name)
            return self._mapped[name]
        descriptor = os.open(f"/proc/{name.process}/fd/{name.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if (found.st_ino, found.st_size) != (name.inode, name.size):
                raise OSError("another file has taken the segment's place")
            if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError("the segment could shrink")
            # Copy on write: nobody here writes, and the source's memory could not be written to.
            memory = np.frombuffer(mmap.mmap(descriptor, name.size, access=mmap.ACCESS_COPY), np.uint8)
        finally:
            os.close(descriptor)
        self._mapped[name] = memory
        if len(self._mapped) > _KEPT_MAX:
            self._mapped.popitem(last=False)
        return memory


class SharedMemory:
    """What the workers of one process have of it."""

    def __init__(self) -> None:
        self.segments = Segments()
        self.mappings = Mappings()


def this_host(environment: Mapping[str, str]) -> bytes:
    """The same for processes that can open each other's segments: same kernel, PID namespace and user.

    Empty where that cannot be told, and where UCX_TLS names transports and none of them is shared memory.
    """
    transports = environment.get("UCX_TLS", "all")
    if transports.startswith("^") or not _SHARED.intersection(transports.split(",")):
        return b""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return b""
    return blake2b(boot + struct.pack("<QQ", space, os.getuid()), digest_size=16).digest()
