"""The format of recordings of a live scheduler: the model's inputs, in order, and the decisions on them. JSON
lines.

It begins with everything that the model knew (`Started`, `InstanceKnown`), so recording can begin at any
time. It contains no text of prompts or answers: requests are ids, lengths, phases, and 64-bit names of their
KV blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

import msgspec

from tailrace.actions import Action, CopyPrefix, Place, Placement, Refuse
from tailrace.cache.follow import CacheState
from tailrace.cache.recent import PrefixArrival
from tailrace.cluster import Arrival, Phase, Pool, RequestView, Stage
from tailrace.control.hot_prefixes import OpenCopy
from tailrace.lengths import LengthWindowState
from tailrace.policy.parameters import Value
from tailrace.records import InstanceRecord, ProfileRecord
from tailrace.slo import Slo

FORMAT: Final = 2
"""Version of the format; incremented when an older reader would misread the new one."""


class InvalidRecordingError(ValueError):
    """The file is not a recording, or one of another format; the message names the line."""


class _Event(msgspec.Struct, frozen=True, tag_field="event"):
    pass


class RecordedMembers(msgspec.Struct, frozen=True):
    """Membership as passed to the model (tailrace.control.reported_cluster.Members)."""

    instances: dict[str, InstanceRecord]
    pools: dict[str, Pool]
    draining: frozenset[str]
    suspects: frozenset[str]
    stages: tuple[Stage, ...]
    profiles: dict[str, ProfileRecord]


# ---- what the model knew when the recording began


class RecordedPolicy(msgspec.Struct, frozen=True):
    """A policy by name, with the parameters that differ from their defaults."""

    name: str
    parameters: dict[str, Value] = {}
    # As in PolicyRecord.
    suspended: str = ""


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

    members: RecordedMembers
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


class Started(_Event, frozen=True, tag="started"):
    """The first line: versions, the policy in force, and the model. `now_s`: the model's clock."""

    format: int
    version: str
    now_s: float
    policy: RecordedPolicy
    default: RecordedPolicy
    slo: Slo
    placements: int
    outgrown: dict[str, str]
    last_tick_s: float | None
    model: ModelKnown


class InstanceKnown(_Event, frozen=True, tag="instance"):
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


# ---- what happened


class MembersChanged(_Event, frozen=True, tag="members"):
    """Membership, pools, stages or profiles changed in etcd."""

    members: RecordedMembers
    now_s: float


class PolicyFollowed(_Event, frozen=True, tag="policy"):
    """The policy or the SLOs changed; policy None: the default."""

    policy: RecordedPolicy | None
    slo: Slo


class ReportsStopped(_Event, frozen=True, tag="silent"):
    """These instances have stopped reporting."""

    instance_ids: list[str]


class Reported(_Event, frozen=True, tag="report"):
    """A worker's report; `deciding`: this scheduler led."""

    report: bytes
    deciding: bool
    now_s: float
    wall_s: float


class CacheListed(_Event, frozen=True, tag="cache"):
    """A worker listed its prefix cache."""

    instance_id: str
    reply: bytes


class Arrived(_Event, frozen=True, tag="arrival"):
    """A request asked for an instance; `incoming` is as its front end asked."""

    incoming: Arrival
    now_s: float
    wall_s: float


class Ticked(_Event, frozen=True, tag="tick"):
    """A tick of the policy."""

    now_s: float
    wall_s: float


class TicksForgotten(_Event, frozen=True, tag="no_ticks"):
    """Another scheduler became leader."""


class MigrationOpened(_Event, frozen=True, tag="migration_opened"):
    """A migration was ordered."""

    request: RequestView
    target_id: str | None


class MigrationClosed(_Event, frozen=True, tag="migration_closed"):
    """A migration is over."""

    request_id: str


class PoolOrdered(_Event, frozen=True, tag="pool_ordered"):
    """A pool move was ordered."""

    instance_id: str
    pool: Pool | None


class PoolSettled(_Event, frozen=True, tag="pool_settled"):
    """A pool order does not count any more."""

    instance_id: str


class CopyOrdered(_Event, frozen=True, tag="copy_ordered"):
    """A copy of a prefix was ordered."""

    copy: CopyPrefix
    now_s: float


class CopySettled(_Event, frozen=True, tag="copy_settled"):
    """A copy of a prefix is over."""

    target_id: str
    now_s: float


class Decided(_Event, frozen=True, tag="decided"):
    """The policy's answer to the preceding input. `answer` null: the policy failed."""

    point: str
    policy: str
    # The request; empty for a tick.
    request_id: str
    answer: msgspec.Raw


class RecordingOverflow(_Event, frozen=True, tag="too_much"):
    """The last line, if the reader was too slow."""


class BrokenOff(_Event, frozen=True, tag="broken_off"):
    """Decoded in place of a last line that was not written completely; never written itself."""


Event: TypeAlias = (
    Started
    | InstanceKnown
    | MembersChanged
    | PolicyFollowed
    | ReportsStopped
    | Reported
    | CacheListed
    | Arrived
    | Ticked
    | TicksForgotten
    | MigrationOpened
    | MigrationClosed
    | PoolOrdered
    | PoolSettled
    | CopyOrdered
    | CopySettled
    | Decided
    | RecordingOverflow
    | BrokenOff
)
Tap: TypeAlias = Callable[[Event], None]


class _Beginning(msgspec.Struct):
    """What every format's first line has."""

    event: str
    format: int
    version: str


encode: Final = msgspec.json.Encoder().encode
_DECODER: Final = msgspec.json.Decoder(Event)


def decode(lines: Iterable[bytes]) -> Iterator[Event]:
    """Decode a recording's lines. Raise InvalidRecordingError, which names the line.

    An incomplete last line, without its line end, is what a full disk or a killed recorder leaves: it yields
    BrokenOff.
    """
    for number, line in enumerate(lines, 1):
        if number == 1:
            _check_format(line)
        try:
            event: Event = _DECODER.decode(line)
        except msgspec.MsgspecError as error:
            if number > 1 and not line.endswith(b"\n"):
                yield BrokenOff()
                return
            raise InvalidRecordingError(f"line {number}: {error}") from error
        if number > 1 and isinstance(event, Started):
            raise InvalidRecordingError(
                f"line {number}: another recording begins; replay each from its own file"
            )
        yield event


def _check_format(line: bytes) -> None:
    """Raise InvalidRecordingError unless this is the first line of a recording that can be read.

    Only what every format has is decoded: the rest of a later one may not be readable.
    """
    try:
        beginning = msgspec.json.decode(line, type=_Beginning)
    except msgspec.MsgspecError as error:
        raise InvalidRecordingError(f"line 1: not the start of a recording ({error})") from error
    if beginning.event != "started":
        raise InvalidRecordingError("line 1: not the start of a recording")
    if beginning.format != FORMAT:
        raise InvalidRecordingError(
            f"format {beginning.format}, of Tailrace {beginning.version}; this one reads {FORMAT}; replay it "
            "with that version"
        )


FAILED: Final = msgspec.Raw(b"null")


def recorded_placement(placement: Placement) -> msgspec.Raw:
    """Encode a placement for a recording."""
    match placement:
        case Refuse():
            return msgspec.Raw(encode({"refuse": placement.reason}))
        case Place():
            place = {"place": placement.instance_id, "also": _plain(placement.also)}
            pull = {"pull_from": placement.pull_from} if placement.pull_from else {}
            return msgspec.Raw(encode({**place, **pull}))


def recorded_actions(actions: Sequence[Action] | None) -> msgspec.Raw:
    """Encode actions for a recording; None: the policy failed."""
    return FAILED if actions is None else msgspec.Raw(encode(_plain(actions)))


def _plain(actions: Sequence[Action]) -> list[dict[str, object]]:
    return [{"action": type(action).__name__, **msgspec.to_builtins(action)} for action in actions]
