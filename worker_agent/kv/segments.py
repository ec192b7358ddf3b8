"""Shared memory for chunks between two processes of one host.

UCX's shared-memory transports cannot handle the failure of a peer: with error handling UCX does not use them,
and without it a peer that is killed during a transfer ends our process too. So between processes of one host
UCX carries requests and headers, over an endpoint that detects the death of the other end at once, and the
source writes the blocks to memory that the target reads. A mapping survives the death of either process, and
everything read is verified.

A segment is an anonymous file, sealed so that it never shrinks while it is mapped. The target opens it as
/proc/PID/fd/FD, which the kernel permits only to the same user in the same PID namespace.
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
# Number of own segments, and of mappings of peers' segments, kept for the next transfers: memory that was
# touched before causes no page faults.
_KEPT_MAX: Final = 4
_SHARED: Final = frozenset({"all", "sm", "shm", "mm", "posix", "sysv", "cma", "knem", "xpmem"})
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SegmentName:
    """The name by which another process of this host opens a segment."""

    process: int
    descriptor: int
    size: int
    inode: int

    def encode(self) -> bytes:
        """Encode the name for the wire."""
        return _NAME.pack(self.process, self.descriptor, self.size, self.inode)

    @classmethod
    def decode(cls, data: bytes) -> SegmentName | None:
        """Decode a name; return None for NO_SEGMENT."""
        name = cls(*_NAME.unpack(data))
        return name if name.size else None


NO_SEGMENT: Final = bytes(NAME_BYTES)


class Segment:
    """A segment of this process."""

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
        """Close the file. Processes that have the segment mapped keep the memory."""
        os.close(self._descriptor)


class Segments:
    """A pool of this process's segments."""

    def __init__(self) -> None:
        self._free: list[Segment] = []

    def take(self, size: int) -> Segment:
        """Return an unused segment of this size in bytes. Raise OSError."""
        for number, segment in enumerate(self._free):
            if segment.name.size == size:
                return self._free.pop(number)
        return Segment(size)

    def give_back(self, segment: Segment) -> None:
        """Return a segment that no process reads any more."""
        self._free.append(segment)
        if len(self._free) > _KEPT_MAX:
            self._free.pop(0).close()

    def close(self) -> None:
        """Close the unused segments."""
        while self._free:
            self._free.pop().close()


class Mappings:
    """Peers' segments, mapped into this process for reading."""

    def __init__(self) -> None:
        self._mapped: OrderedDict[SegmentName, Bytes] = OrderedDict()

    def map(self, name: SegmentName) -> Bytes:
        """Map a segment. Raise OSError if it cannot be opened or does not match its name."""
        if name in self._mapped:
            self._mapped.move_to_end(name)
            return self._mapped[name]
        descriptor = os.open(f"/proc/{name.process}/fd/{name.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if (status.st_ino, status.st_size) != (name.inode, name.size):
                raise OSError("another file has taken the segment's place")
            if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError("the segment could shrink")
            # Copy on write, so that this process could not modify the source's memory even by mistake.
            memory = np.frombuffer(mmap.mmap(descriptor, name.size, access=mmap.ACCESS_COPY), np.uint8)
        finally:
            os.close(descriptor)
        self._mapped[name] = memory
        if len(self._mapped) > _KEPT_MAX:
            self._mapped.popitem(last=False)
        return memory


class SharedMemory:
    """The shared memory of the workers of one process."""

    def __init__(self) -> None:
        self.segments = Segments()
        self.mappings = Mappings()


def this_host(environment: Mapping[str, str]) -> bytes:
    """Return an identifier that is equal for processes that can open each other's segments: same kernel, PID
    namespace and user.

    Empty if it cannot be determined, or if UCX_TLS excludes shared memory.
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
