"""What happens to a scheduler: the events that its model of the cluster and its policy learn of.

They are all that a decision depends on. A recording is the sequence of them, with the decisions on them
(`recording.py`).
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from tailrace.actions import CopyPrefix
from tailrace.cluster import Arrival, Pool, RequestView, Stage
from tailrace.members import Members
from tailrace.records import InstanceRecord, PolicyRecord, ProfileRecord
from tailrace.slo import Slo
from tailrace.v1 import cache_pb2, monitor_pb2


class KnownMembers(msgspec.Struct, frozen=True):
    """The membership at one moment."""

    instances: dict[str, InstanceRecord]
    pools: dict[str, Pool]
    draining: frozenset[str]
    suspects: frozenset[str]
    stages: tuple[Stage, ...]
    profiles: dict[str, ProfileRecord]

    @staticmethod
    def of(members: Members) -> KnownMembers:
        """Return the membership now."""
        return KnownMembers(
            dict(members.instances),
            dict(members.pools),
            members.draining,
            members.suspects,
            members.stages,
            dict(members.profiles),
        )


class Event(msgspec.Struct, frozen=True, tag_field="event"):
    """An event; recorded under the tag of its type. `now_s`: the model's clock; `wall_s`: the time of day."""


# ---- what the cluster reports


class MembersChanged(Event, frozen=True, tag="members"):
    """Membership, pools, stages or profiles changed in etcd."""

    members: KnownMembers
    now_s: float


class ReportsStopped(Event, frozen=True, tag="silent"):
    """These instances have stopped reporting."""

    instance_ids: list[str]


class Reported(Event, frozen=True, tag="report"):
    """A worker's report; `deciding`: this scheduler led."""

    report: monitor_pb2.WorkerReport
    deciding: bool
    now_s: float
    wall_s: float


class CacheListed(Event, frozen=True, tag="cache"):
    """A worker listed its prefix cache."""

    instance_id: str
    reply: cache_pb2.ListCacheReply


# ---- what the policy is asked about, besides reports


class Arrived(Event, frozen=True, tag="arrival"):
    """A request asked for an instance; `incoming` is as its front end asked."""

    incoming: Arrival
    now_s: float
    wall_s: float


class Ticked(Event, frozen=True, tag="tick"):
    """A tick of the policy."""

    now_s: float
    wall_s: float


class TicksForgotten(Event, frozen=True, tag="no_ticks"):
    """Another scheduler became leader."""


class PolicyFollowed(Event, frozen=True, tag="policy"):
    """The policy or the SLOs changed; policy None: the default."""

    policy: PolicyRecord | None
    slo: Slo


# ---- what is ordered, and its end


class MigrationOpened(Event, frozen=True, tag="migration_opened"):
    """A migration was ordered."""

    request: RequestView
    target_id: str | None


class MigrationClosed(Event, frozen=True, tag="migration_closed"):
    """A migration is over."""

    request_id: str


class PoolOrdered(Event, frozen=True, tag="pool_ordered"):
    """A pool move was ordered."""

    instance_id: str
    pool: Pool | None


class PoolSettled(Event, frozen=True, tag="pool_settled"):
    """A pool order does not count any more."""

    instance_id: str


class CopyOrdered(Event, frozen=True, tag="copy_ordered"):
    """A copy of a prefix was ordered."""

    copy: CopyPrefix
    now_s: float


class CopySettled(Event, frozen=True, tag="copy_settled"):
    """A copy of a prefix is over."""

    target_id: str
    now_s: float


Order: TypeAlias = MigrationOpened | PoolOrdered | CopyOrdered
"""What the model refuses if it contradicts another order."""
Input: TypeAlias = (
    MembersChanged
    | ReportsStopped
    | Reported
    | CacheListed
    | Arrived
    | Ticked
    | TicksForgotten
    | PolicyFollowed
    | MigrationClosed
    | PoolSettled
    | CopySettled
    | Order
)
"""Whatever a decision depends on."""
