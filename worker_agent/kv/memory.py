"""The memory of transfers: staging buffers for chunks, and memory shared by two processes of one host.

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
import logging
import mmap
import os
import struct
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from worker_agent.engine.base import Staging
from worker_agent.kv.address import KvTransferError

log = logging.getLogger(__name__)

# Chosen by measurement: see ucx.py.
HOST_CHUNK_BYTES: Final = 8 << 20
# Each layer costs kernel launches: on an H100, gathering one block of an 8B model takes as long as gathering
# 16 (docs/gpu-checks.md). Each migration has up to WINDOW of these on either GPU.
DEVICE_CHUNK_BYTES: Final = 32 << 20

# process, file descriptor, size, inode
_NAME: Final = struct.Struct("<IIQQ")
NAME_BYTES: Final = _NAME.size
# Number of own segments, and of mappings of peers' segments, kept for the next transfers: memory that was
# touched before causes no page faults.
_SEGMENTS_KEPT_MAX: Final = 4
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
            self._mapping = mmap.mmap(self._descriptor, size)
            self.memory: Bytes = np.frombuffer(self._mapping, np.uint8)
            inode = os.fstat(self._descriptor).st_ino
        except BaseException:
            os.close(self._descriptor)
            raise
        self.name = SegmentName(os.getpid(), self._descriptor, size, inode)

    def close(self) -> None:
        """Close the file and unmap it. Processes that have the segment mapped keep the memory."""
        os.close(self._descriptor)
        del self.memory
        _unmap(self._mapping)


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
        if len(self._free) > _SEGMENTS_KEPT_MAX:
            self._free.pop(0).close()

    def close(self) -> None:
        """Close the unused segments."""
        while self._free:
            self._free.pop().close()


@dataclass(slots=True)
class _Mapping:
    memory: mmap.mmap
    # Transfers that use it.
    users: int = 0


class Mappings:
    """Peers' segments, mapped into this process for reading. Each mapping holds a file descriptor."""

    def __init__(self) -> None:
        # In the order of their last use.
        self._mapped: OrderedDict[SegmentName, _Mapping] = OrderedDict()

    def __len__(self) -> int:
        return len(self._mapped)

    def map(self, name: SegmentName) -> Bytes:
        """Map a segment; `release` it when nothing refers to it any more.

        Raise OSError if it cannot be opened or does not match its name.
        """
        mapping = self._mapped.get(name)
        if mapping is None:
            mapping = self._mapped[name] = _Mapping(_map(name))
        mapping.users += 1
        return np.frombuffer(mapping.memory, np.uint8)

    def release(self, name: SegmentName) -> None:
        """Take back a `map`. The mapping is kept for the next transfers, if few enough are."""
        mapping = self._mapped[name]
        mapping.users -= 1
        self._mapped.move_to_end(name)
        idle = [name for name, mapping in self._mapped.items() if not mapping.users]
        self._close(idle[: max(0, len(idle) - _SEGMENTS_KEPT_MAX)])

    def drop_gone(self) -> None:
        """Unmap unused segments that their process has closed, or which has ended itself."""
        unused = [name for name, mapping in self._mapped.items() if not mapping.users]
        self._close([name for name in unused if not _exists(name)])

    def _close(self, names: Iterable[SegmentName]) -> None:
        for name in names:
            _unmap(self._mapped.pop(name).memory)


def _unmap(memory: mmap.mmap) -> None:
    try:
        memory.close()
    except BufferError:
        # An error that is being handled has a view of it in its frames, and frees it with them.
        log.debug("a mapping is still referred to")


def _exists(name: SegmentName) -> bool:
    try:
        status = os.stat(f"/proc/{name.process}/fd/{name.descriptor}")
    except OSError:
        return False
    return (status.st_ino, status.st_size) == (name.inode, name.size)


def _map(name: SegmentName) -> mmap.mmap:
    descriptor = os.open(f"/proc/{name.process}/fd/{name.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if (status.st_ino, status.st_size) != (name.inode, name.size):
            raise OSError("another file has taken the segment's place")
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError("the segment could shrink")
        # Copy on write, so that this process could not modify the source's memory even by mistake.
        return mmap.mmap(descriptor, name.size, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)


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


class KvMemory(Protocol):
    """Allocates staging buffers and reads blocks of exports into them. Called from one event loop only."""

    def staging(self, num_blocks: int) -> Staging:
        """Return a contiguous buffer for `num_blocks` blocks in the memory that holds the KV. Raise
        EngineRefusal if it has no room."""

    def staging_over(self, memory: npt.NDArray[np.uint8]) -> Staging | None:
        """Return a buffer over this host memory, of a whole number of blocks; None if the KV is not in host
        memory."""

    async def read_blocks(
        self, request_id: str, first_block: int, num_blocks: int, out: Staging
    ) -> list[int]:
        """Copy an export's blocks into `out`; return a 64-bit checksum per block. Raise EngineRefusal."""


_BUFFERS_KEPT_MAX: Final = 8


def require_sealable(memory: KvMemory, block_bytes: int) -> None:
    """Raise KvTransferError unless KV passes through host memory, where it can be encrypted."""
    if _on_device(memory, block_bytes):
        raise KvTransferError(
            "--encrypt-kv: KV in device memory cannot be encrypted; encrypt the link (WireGuard, IPsec) "
            "and omit the option"
        )


def _on_device(memory: KvMemory, block_bytes: int) -> bool:
    return memory.staging_over(np.zeros(block_bytes, np.uint8)) is None


class StagingPool:
    """The staging buffers of one engine or rank. Buffers of a full chunk are kept; smaller ones are not."""

    def __init__(self, memory: KvMemory, block_bytes: int) -> None:
        chunk_bytes = DEVICE_CHUNK_BYTES if _on_device(memory, block_bytes) else HOST_CHUNK_BYTES
        self._memory = memory
        self.chunk_blocks = max(1, chunk_bytes // block_bytes)
        self._free: list[Staging] = []

    def take(self, num_blocks: int) -> Staging:
        """Return a buffer of exactly this many blocks, at most `chunk_blocks`. Raise EngineRefusal if the
        memory has no room for it."""
        if num_blocks == self.chunk_blocks and self._free:
            return self._free.pop()
        return self._memory.staging(num_blocks)

    def over(self, memory: npt.NDArray[np.uint8]) -> Staging | None:
        """Return a buffer over this host memory; None if the KV is not in host memory."""
        return self._memory.staging_over(memory)

    def give_back(self, staging: Staging, num_blocks: int) -> None:
        """Return a buffer that no transfer uses any more."""
        if num_blocks == self.chunk_blocks and len(self._free) < _BUFFERS_KEPT_MAX:
            self._free.append(staging)
