"""Messages between a worker and the ranks of its engine: msgpack, each prefixed with its length.

Both ends belong to one process tree and run one version; `rank_links.py` admits nobody else.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from worker_agent.engine.errors import EngineRefusal, KvCorrupt
from worker_agent.kv.address import KvAddress, KvIdentityError, KvShape, KvTransferError

_LENGTH: Final = struct.Struct("<I")
# The block hashes of the longest context take a few megabytes.
_BYTES_MAX: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Address:
    """Where the worker listens for its ranks, and the secret that admits one."""

    path: str
    secret: bytes


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The rank's first message."""

    rank: int
    secret: bytes


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Start UCX with these options (names without UCX_), for KV of this shape. Answered by Begun."""

    instance_id: str
    fingerprint: str
    block_tokens: int
    ucx: dict[str, str]
    # Whether KV is encrypted before it leaves the host.
    sealed: bool


class Begun(msgspec.Struct, frozen=True, tag=True):
    """Where the same rank of other workers connects to this one."""

    address: KvAddress


class Open(msgspec.Struct, frozen=True, tag=True):
    """Allow this address to read the export's announced blocks. Answered by Opened."""

    export: int
    target: KvAddress


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The ticket that entitles the target to read."""

    ticket: bytes


class Announce(msgspec.Struct, frozen=True, tag=True):
    """Blocks of an export from number `first_block` on: their hashes, and their places in this rank."""

    export: int
    first_block: int
    hashes: list[bytes]
    block_ids: list[int]


class AskQuiet(msgspec.Struct, frozen=True, tag=True):
    """Ask for how long an export's target has requested nothing. Answered by Quiet."""

    export: int


class Quiet(msgspec.Struct, frozen=True, tag=True):
    """Seconds since the target's last request."""

    seconds: float


class End(msgspec.Struct, frozen=True, tag=True):
    """End an export; nothing of it is read any more. `taken`: the target has all of it. Answered by Ended."""

    export: int
    taken: bool


class Ended(msgspec.Struct, frozen=True, tag=True):
    """What was sent since the previous Ended."""

    blocks: int
    bytes: int


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Start a transfer of the request from the same rank of the source."""

    transfer: int
    request_id: str
    source: KvAddress
    ticket: bytes


class Pull(msgspec.Struct, frozen=True, tag=True):
    """Fetch the blocks with these hashes and write them to these places. Answered by Pulled.

    Blocks beyond the places are kept until `settle`.
    """

    transfer: int
    first_block: int
    hashes: list[bytes]
    block_ids: list[int]


class Pulled(msgspec.Struct, frozen=True, tag=True):
    """The number of bytes received."""

    bytes: int


class Close(msgspec.Struct, frozen=True, tag=True):
    """End a transfer; nothing is written for it once this is answered."""

    transfer: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Ask whether the rank is alive."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the transfers and UCX, because the engine stops."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """The command succeeded."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The command failed. `kind`: the key in ERRORS of the exception to raise in the worker."""

    kind: str
    reason: str


Command: TypeAlias = Begin | Open | Announce | AskQuiet | End | Connect | Pull | Close | Ping | Stop
RankAnswer: TypeAlias = Begun | Opened | Quiet | Ended | Pulled | Done | Failed


class NumberedCommand(msgspec.Struct, frozen=True):
    """A command, and the number that its answer will carry."""

    number: int
    command: Command


class NumberedAnswer(msgspec.Struct, frozen=True):
    """An answer, and the number of its command."""

    number: int
    answer: RankAnswer


ERRORS: Final[dict[str, type[Exception]]] = {
    "corrupt": KvCorrupt,
    "identity": KvIdentityError,
    "refused": EngineRefusal,
    "transfer": KvTransferError,
}


def failed(error: Exception) -> Failed:
    """Convert an error into an answer; an error of a foreign type becomes a failed transfer."""
    kind = next((name for name, type_ in ERRORS.items() if isinstance(error, type_)), "transfer")
    return Failed(kind, str(error) or type(error).__name__)


def rank_shape(fingerprint: str, block_tokens: int, num_layers: int, layer_block_bytes: int) -> KvShape:
    """Return the shape of one rank's blocks; the fingerprint identifies the rank."""
    return KvShape(fingerprint, block_tokens, num_layers, layer_block_bytes)


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message with its length prefix."""
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Read the next message.

    Raise asyncio.IncompleteReadError at the end of the stream, ValueError if the message is too large.
    """
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > _BYTES_MAX:
        raise ValueError(f"a message of {size} bytes")
    return await reader.readexactly(size)
