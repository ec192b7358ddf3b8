"""A recording of a live scheduler: what its model was fed, in order, and what was decided on it. JSON lines.

It begins with all that the model knew (`Started`, `InstanceKnown`), so that recording can begin at any time.
There is no text of prompts or answers in it: requests are ids, lengths, phases, and 64-bit names of
their KV blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

import msgspec

from tailrace.actions import Action, CopyPrefix, Place, Placement, Refuse
from tailrace.cache.follow import CacheState
from tailrace.cache.recent import PrefixArrival
from tailrace.cluster import Incoming, Phase, Pool, RequestView, Stage
from tailrace.control.hot_prefixes import CopyUnderWay
from tailrace.lengths import LengthWindowState
from tailrace.policy.parameters import Value
from tailrace.records import InstanceRecord, ProfileRecord
from tailrace.slo import Slo

FORMAT: Final = 1
"""Raised when an older reader would misread what is written."""


class BadRecordingError(ValueError):
    """A file is no recording, or one of another format; the message says where."""


class _Event(msgspec.Struct, frozen=True, tag_field="event"):
    pass


class RecordedMembers(msgspec.Struct, frozen=True):
    """Membership as the model takes it over (tailrace.control.reported_cluster.Members)."""

    instances: dict[str, InstanceRecord]
    pools: dict[str, Pool]
    draining: frozenset[str]
    suspects: frozenset[str]
    stages: tuple[Stage, ...]
    profiles: dict[str, ProfileRecord]


# ---- what the model knew when the recording began


class RecordedPolicy(msgspec.Struct, frozen=True):
    """A policy by name, with those of its parameters that are not at their defaults."""

    name: str
    parameters: dict[str, Value] = {}


class RecordedWhere(msgspec.Struct, frozen=True):
    """Who has a request."""

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
    """Blocks that an instance is about to hold."""

    placed_s: float
    instance_id: str
    names: list[int]


class RecentState(msgspec.Struct, frozen=True):
    """What arrivals of the last seconds began with, oldest first."""

    period_s: float
    arrivals: list[PrefixArrival]


class ModelKnown(msgspec.Struct, frozen=True):
    """What the model knows that belongs to no one instance."""

    members: RecordedMembers
    silent: frozenset[str]
    where: list[RecordedWhere]
    # Open migrations: from where, and to where if that is known.
    migrating: dict[str, tuple[str, str | None]]
    # Pool moves that etcd does not tell of yet: instance, before, after.
    ordered: list[tuple[str, Pool | None, Pool | None]]
    lengths: LengthWindowState | None
    placed: list[RecordedPlacement]
    # Kept only for a policy that copies prefixes ahead; and such copies that count.
    recent: RecentState | None = None
    copies: list[CopyUnderWay] = []


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
    """One line an instance: its last report and what corrects it. `load`: the message."""

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
    """Another policy, or other SLOs; policy None: the default."""

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
    """A request asked for an instance."""

    incoming: Incoming
    now_s: float
    wall_s: float


class Ticked(_Event, frozen=True, tag="tick"):
    """A tick of the policy."""

    now_s: float
    wall_s: float


class TicksForgotten(_Event, frozen=True, tag="no_ticks"):
    """Another scheduler came to lead."""


class MigrationOpened(_Event, frozen=True, tag="migration_opened"):
    """A migration was ordered."""

    request: RequestView
    target_id: str | None


class MigrationClosed(_Event, frozen=True, tag="migration_closed"):
    """It is over."""

    request_id: str


class PoolOrdered(_Event, frozen=True, tag="pool_ordered"):
    """A pool move was ordered."""

    instance_id: str
    pool: Pool | None


class PoolSettled(_Event, frozen=True, tag="pool_settled"):
    """It counts no longer."""

    instance_id: str


class CopyOrdered(_Event, frozen=True, tag="copy_ordered"):
    """A copy of a prefix was ordered."""

    copy: CopyPrefix
    now_s: float


class CopySettled(_Event, frozen=True, tag="copy_settled"):
    """It is over."""

    target_id: str
    now_s: float


class Decided(_Event, frozen=True, tag="decided"):
    """What the policy answered to the input before it. `answer` null: it failed."""

    point: str
    policy: str
    # The request that it is about; empty: a tick.
    request_id: str
    answer: msgspec.Raw


class TooMuch(_Event, frozen=True, tag="too_much"):
    """The last line, where whoever reads the recording could not keep up with it."""


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
    | TooMuch
)
Tap: TypeAlias = Callable[[Event], None]


encode: Final = msgspec.json.Encoder().encode
_DECODER: Final = msgspec.json.Decoder(Event)


def decode(lines: Iterable[bytes]) -> Iterator[Event]:
    """Raises BadRecordingError, naming the line."""
    for number, line in enumerate(lines, 1):
        try:
            event: Event = _DECODER.decode(line)
        except msgspec.MsgspecError as error:
            raise BadRecordingError(f"line {number}: {error}") from error
        if isinstance(event, Started) and event.format != FORMAT:
            raise BadRecordingError(
                f"format {event.format}, of Tailrace {event.version}; this one reads {FORMAT}"
            )
        yield event


FAILED: Final = msgspec.Raw(b"null")


def recorded_placement(placement: Placement) -> msgspec.Raw:
    """A placement as it stands in a recording."""
    match placement:
        case Refuse():
            return msgspec.Raw(encode({"refuse": placement.reason}))
        case Place():
            place = {"place": placement.instance_id, "also": _plain(placement.also)}
            pull = {"pull_from": placement.pull_from} if placement.pull_from else {}
            return msgspec.Raw(encode({**place, **pull}))


def recorded_actions(actions: Sequence[Action] | None) -> msgspec.Raw:
    """Actions as they stand in a recording; None: the policy failed."""
    return FAILED if actions is None else msgspec.Raw(encode(_plain(actions)))


def _plain(actions: Sequence[Action]) -> list[dict[str, object]]:
    return [{"action": type(action).__name__, **msgspec.to_builtins(action)} for action in actions]
