"""What a worker says to the ranks of its engine, and what they answer. msgpack, each behind its length.

Both ends are of one process tree and one version; nobody else is let in (`links.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from worker_agent.engine.errors import EngineRefusal, KvCorrupt
from worker_agent.kv.address import KvAddress, KvIdentityError, KvShape, KvTransferError

# What vLLM calls the file by which an engine's ranks meet, unique to them.
_MEETING: Final = "vllm_dist_"
_SHARED: Final = Path("/dev/shm")


def remove_meeting(name: str) -> None:
    """Remove the file of this name by which ranks met, and the memory that vLLM's ranks on a CPU share.

    Once no rank needs them any more; nothing happens if they are gone, or if vLLM had another way to meet.
    """
    if not name.startswith(_MEETING):
        return
    for path in (Path(tempfile.gettempdir(), name), *_SHARED.glob(f"{glob.escape(name)}-*")):
        with contextlib.suppress(OSError):
            path.unlink()


_LENGTH: Final = struct.Struct("<I")
# The names of the blocks of the longest context are a few megabytes.
_BYTES_MAX: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Address:
    """Where the worker waits for its ranks, and what lets one in."""

    path: str
    secret: bytes


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message, from the rank."""

    rank: int
    secret: bytes


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Start UCX with these options (names without UCX_), for KV of this shape. Answered by Begun."""

    instance_id: str
    fingerprint: str
    block_tokens: int
    ucx: dict[str, str]
    # Whether KV leaves the host encrypted.
    sealed: bool


class Begun(msgspec.Struct, frozen=True, tag=True):
    """Where other workers' ranks reach this one."""

    address: KvAddress


class Open(msgspec.Struct, frozen=True, tag=True):
    """Let this address read what is announced of the export. Answered by Opened."""

    export: int
    target: KvAddress


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The right to read it."""

    ticket: bytes


class Announce(msgspec.Struct, frozen=True, tag=True):
    """Blocks of an export from number `first_block` on: their names, and where they are here."""

    export: int
    first_block: int
    hashes: list[bytes]
    block_ids: list[int]


class End(msgspec.Struct, frozen=True, tag=True):
    """Nothing of the export is to be read any more. `taken`: its target has all of it. Answered by Ended."""

    export: int
    taken: bool


class Ended(msgspec.Struct, frozen=True, tag=True):
    """What was sent since the last such answer."""

    blocks: int
    bytes: int


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Begin a transfer of this request from a source's rank."""

    transfer: int
    request_id: str
    source: KvAddress
    ticket: bytes


class Pull(msgspec.Struct, frozen=True, tag=True):
    """Fetch the blocks of these names and write them to these places; those beyond the places are kept until
    `settle`. Answered by Pulled."""

    transfer: int
    first_block: int
    hashes: list[bytes]
    block_ids: list[int]


class Pulled(msgspec.Struct, frozen=True, tag=True):
    """Bytes that came."""

    bytes: int


class Close(msgspec.Struct, frozen=True, tag=True):
    """Nothing is written for this transfer any more once this is answered."""

    transfer: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Say that you are there."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The engine stops: end UCX."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """It is."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """It is not. `kind`: what to raise at the other end."""

    kind: str
    reason: str


Command: TypeAlias = Begin | Open | Announce | End | Connect | Pull | Close | Ping | Stop
Answer: TypeAlias = Begun | Opened | Ended | Pulled | Done | Failed


class Asked(msgspec.Struct, frozen=True):
    """A command with the number that its answer will have."""

    number: int
    command: Command


class Answered(msgspec.Struct, frozen=True):
    """An answer."""

    number: int
    answer: Answer


ERRORS: Final[dict[str, type[Exception]]] = {
    "corrupt": KvCorrupt,
    "identity": KvIdentityError,
    "refused": EngineRefusal,
    "transfer": KvTransferError,
}


def failed(error: Exception) -> Failed:
    """An error as an answer; one of no kind of ours ends the transfer like a broken connection."""
    kind = next((name for name, type_ in ERRORS.items() if isinstance(error, type_)), "transfer")
    return Failed(kind, str(error) or type(error).__name__)


def rank_shape(fingerprint: str, block_tokens: int, num_layers: int, layer_block_bytes: int) -> KvShape:
    """What one rank's blocks are; the fingerprint of a rank names the rank."""
    return KvShape(fingerprint, block_tokens, num_layers, layer_block_bytes)


def encode(message: msgspec.Struct) -> bytes:
    """As it goes over the socket."""
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next message. Raises asyncio.IncompleteReadError at the end of the stream, ValueError when it is
    too large."""
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > _BYTES_MAX:
        raise ValueError(f"a message of {size} bytes")
    return await reader.readexactly(size)
