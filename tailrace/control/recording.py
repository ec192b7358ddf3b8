"""The format of recordings of a live scheduler: the model's inputs, in order, and the decisions on them. JSON
lines.

It begins with everything that the model knew (`Started`, `InstanceKnown`), so recording can begin at any
time. It contains no text of prompts or answers: requests are ids, lengths, phases, and 64-bit names of their
KV blocks.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

import msgspec
from google.protobuf.message import DecodeError, Message

from tailrace.actions import Action, Place, Refuse
from tailrace.cache.follow import CacheState
from tailrace.cache.recent import PrefixArrival
from tailrace.cluster import Phase, Pool, RequestView
from tailrace.control.answers import Answer
from tailrace.control.events import CacheListed, Event, Input, KnownMembers, Reported
from tailrace.control.hot_prefixes import OpenCopy
from tailrace.lengths import LengthWindowState
from tailrace.records import PolicyRecord
from tailrace.slo import Slo
from tailrace.v1 import cache_pb2, monitor_pb2

FORMAT: Final = 2
"""Version of the format; incremented when an older reader would misread the new one."""


class InvalidRecordingError(ValueError):
    """The file is not a recording, or one of another format; the message names the line."""


# ---- what the model knew when the recording began


class RecordedWhere(msgspec.Struct, frozen=True):
    """The location of a request."""

    request_id: str
    instance_id: str
    epoch: int
    phase: Phase


class RecordedPending(msgspec.Struct, frozen=True):
    """A placement that no report shows yet."""

    request: RequestView
    placed_s: float
    cached_tokens: int


class RecordedPlacement(msgspec.Struct, frozen=True):
    """Blocks that an instance will hold soon."""

    placed_s: float
    instance_id: str
    names: list[int]


class RecentState(msgspec.Struct, frozen=True):
    """The prefixes of recent arrivals, oldest first."""

    period_s: float
    arrivals: list[PrefixArrival]


class ModelKnown(msgspec.Struct, frozen=True):
    """The model's state that does not belong to a single instance."""

    members: KnownMembers
    silent: frozenset[str]
    where: list[RecordedWhere]
    # Open migrations by request: source, and target if known.
    migrating: dict[str, tuple[str, str | None]]
    # Pool moves that etcd's watch has not delivered yet: instance, before, after.
    ordered: list[tuple[str, Pool | None, Pool | None]]
    lengths: LengthWindowState | None
    placed: list[RecordedPlacement]
    # Tracked only for a policy that copies prefixes ahead of need; and its open copies.
    recent: RecentState | None = None
    copies: list[OpenCopy] = []
    # When the last report of any instance was applied; None: never.
    heard_s: float | None = None


class Started(Event, frozen=True, tag="started"):
    """The first line: versions, the policy in force, and the model. `now_s`: the model's clock."""

    format: int
    version: str
    now_s: float
    policy: PolicyRecord
    default: PolicyRecord
    slo: Slo
    placements: int
    outgrown: dict[str, str]
    last_tick_s: float | None
    model: ModelKnown


class InstanceKnown(Event, frozen=True, tag="instance"):
    """One line per instance: its last report (`load`: the encoded message) and the corrections to it."""

    instance_id: str
    load: bytes | None
    heard_s: float
    requests: list[RequestView]
    pending: list[RecordedPending]
    coming: dict[str, int]
    coming_context: dict[str, int]
    leaving: list[str]
    running_change: int
    waiting_change: int
    context_change: int
    kv_change: int
    cache: CacheState | None


# ---- what was decided


class Decided(Event, frozen=True, tag="decided"):
    """The policy's answer to the preceding input. `answer` null: the policy failed."""

    point: str
    policy: str
    # The request; empty for a tick.
    request_id: str
    answer: msgspec.Raw


class RecordingOverflow(Event, frozen=True, tag="too_much"):
    """The last line, if the reader was too slow."""


class BrokenOff(Event, frozen=True, tag="broken_off"):
    """Decoded in place of a last line that was not written completely; never written itself."""


Line: TypeAlias = Started | InstanceKnown | Input | Decided | RecordingOverflow | BrokenOff
"""What a line of a recording says."""


class _Beginning(msgspec.Struct):
    """What every format's first line has."""

    event: str
    format: int
    version: str


class _UnreadableMessage(Exception):
    """A message in an event cannot be read; the error's text names the event."""


_MESSAGE_IN: Final = {monitor_pb2.WorkerReport: Reported, cache_pb2.ListCacheReply: CacheListed}


def _encoded_message(message: object) -> bytes:
    """Return a message in an event as it is recorded: encoded."""
    assert isinstance(message, Message)
    return message.SerializeToString()


def _decoded_message(kind: type[Message], recorded: str) -> Message:
    try:
        return kind.FromString(b64decode(recorded, validate=True))
    except DecodeError as error:
        raise _UnreadableMessage(f"the message in {_MESSAGE_IN[kind].__name__}: {error}") from error


encode: Final = msgspec.json.Encoder(enc_hook=_encoded_message).encode
_DECODER: Final = msgspec.json.Decoder(Line, dec_hook=_decoded_message)


def decode(lines: Iterable[bytes]) -> Iterator[Line]:
    """Decode a recording's lines; blank ones are skipped. Raise InvalidRecordingError, which names the line.

    An incomplete last line, without its line end, is what a full disk or a killed recorder leaves: it yields
    BrokenOff.
    """
    begun = False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not begun:
            _check_format(line, number)
        try:
            event: Line = _DECODER.decode(line)
        except _UnreadableMessage as error:
            raise InvalidRecordingError(str(error)) from error
        except msgspec.MsgspecError as error:
            if begun and not line.endswith(b"\n"):
                yield BrokenOff()
                return
            raise InvalidRecordingError(f"line {number}: {error}") from error
        if begun and isinstance(event, Started):
            raise InvalidRecordingError(
                f"line {number}: another recording begins; replay each from its own file"
            )
        begun = True
        yield event


def _check_format(line: bytes, number: int) -> None:
    """Raise InvalidRecordingError unless this is the first line of a recording that can be read.

    Only what every format has is decoded: the rest of a later one may not be readable.
    """
    try:
        beginning = msgspec.json.decode(line, type=_Beginning)
    except msgspec.MsgspecError as error:
        raise InvalidRecordingError(f"line {number}: not the start of a recording ({error})") from error
    if beginning.event != "started":
        raise InvalidRecordingError(f"line {number}: not the start of a recording")
    if beginning.format != FORMAT:
        raise InvalidRecordingError(
            f"format {beginning.format}, of Tailrace {beginning.version}; this one reads {FORMAT}; replay it "
            "with that version"
        )


FAILED: Final = msgspec.Raw(b"null")


def recorded_answer(answer: Answer) -> msgspec.Raw:
    """Encode a policy's answer for a recording; None: it failed."""
    match answer:
        case None:
            return FAILED
        case Refuse():
            return msgspec.Raw(encode({"refuse": answer.reason}))
        case Place():
            place = {"place": answer.instance_id, "also": _plain(answer.also)}
            pull = {"pull_from": answer.pull_from} if answer.pull_from else {}
            return msgspec.Raw(encode({**place, **pull}))
        case _:
            return msgspec.Raw(encode(_plain(answer)))


def _plain(actions: Sequence[Action]) -> list[dict[str, object]]:
    return [{"action": type(action).__name__, **msgspec.to_builtins(action)} for action in actions]
