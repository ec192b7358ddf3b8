"""The description of a simulated cluster: instances, links, host memory, reports and migration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from simulator.request import SimRequest
from tailrace.actions import WhenFull
from tailrace.cluster import Pool, Stage
from tailrace.handover import TRANSFERS
from tailrace.perf.horizon import FutureLoad
from tailrace.perf.length_penalty import FittedLengthPenalty
from tailrace.profiles import Profile
from tailrace.slo import READING_S


class LengthPredictor(Protocol):
    """A worker's prediction of a request's remaining output (ARES, section 4)."""

    def remaining(self, request: SimRequest, output_tokens: int) -> float | None:
        """Return the predicted output tokens after the first `output_tokens`, or None for no prediction.

        Must be a pure function of its arguments, so that runs can be repeated.
        """
        ...


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One instance: a model on a GPU, and the limits of its engine."""

    instance_id: str
    profile: Profile
    # KV capacity of the device; None: the profile's.
    kv_capacity_tokens: int | None = None
    block_tokens: int = 16
    # Host memory for KV, first of all of preempted requests; 0: those are recomputed. 256 GiB is an eighth of
    # a 2 TiB server with eight GPUs; workers default to 4 GiB. A step that copies to or from host memory
    # waits for the time given by the profile's `swap`.
    host_kv_bytes: int = 256 * 1024**3
    # Limits of a batch (requests) and of a step (tokens of decodes and prefill chunks together).
    max_num_seqs: int = 256
    chunk_budget_tokens: int = 2048
    max_model_len: int = 131_072
    # Tokens in the batch up to which the TPOT SLO holds, as profiled (Arrow, section 5.4); None: not
    # profiled.
    max_running_tokens: int | None = None
    pool: Pool | None = None
    penalty: FittedLengthPenalty | None = None
    # Whether prefixes stay cached, for workloads that name their blocks. Enabled by default in vLLM, absent
    # in the papers' systems.
    prefix_caching: bool = False
    # Whether blocks evicted from the device stay in the host memory that preempted requests leave free.
    host_caching: bool = False

    @property
    def kv_blocks(self) -> int:
        """Return the number of KV blocks on the device."""
        tokens = (
            self.profile.kv_capacity_tokens if self.kv_capacity_tokens is None else self.kv_capacity_tokens
        )
        return tokens // self.block_tokens

    @property
    def block_bytes(self) -> int:
        """Return the size of one KV block, in bytes."""
        return self.block_tokens * self.profile.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """The network: one full-duplex port per instance, shared equally by its transfers."""

    # 100 Gbit/s.
    bytes_per_s: float = 12.5e9
    latency_s: float = 0.0005
    # Total capacity of all transfers; None: a non-blocking fabric, limited by ports only.
    fabric_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class MigrationSpec:
    """Live migration in rounds (design, section 6), admitted as by the live migration service."""

    # Concurrent migrations per instance and direction; others wait.
    limit: int = TRANSFERS
    # How many migrations may wait for admission in the whole cluster, and how long, here and at the target.
    queue_limit: int = 256
    patience_s: float = 10.0
    when_full: WhenFull = WhenFull.WAIT
    # Whether the target reserves room only after admission, as in the live services, so that a migration that
    # waits for room or is refused occupies a slot meanwhile. False: before admission, as in the papers.
    room_last: bool = False
    # Pre-copy rounds during which the source keeps decoding, before the last round, which pauses the request.
    max_rounds: int = 4
    # Whether the request is paused from the start, as long as it waits for room and for admission, too
    # (Arrow's q_2, equation 4): there is one round then.
    paused: bool = False
    # From admission to the first byte, and from the last byte to the first step on the target.
    open_s: float = 0.002
    commit_s: float = 0.001
    # Mean latency of a bid-ask message between two instances; each takes 0.5 to 1.5 times as long.
    message_s: float = 0.001


@dataclass(frozen=True, slots=True)
class ReportSpec:
    """How stale a policy's view is. With an `interval_s` of 0, every view is exact at the time of the
    decision."""

    # The workers' default.
    interval_s: float = 0.5
    # Latency of periodic reports and phase events from an instance to the policy.
    delay_s: float = 0.002


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A cluster to simulate."""

    instances: tuple[InstanceSpec, ...]
    link: LinkSpec = field(default_factory=LinkSpec)
    migration: MigrationSpec = field(default_factory=MigrationSpec)
    report: ReportSpec = field(default_factory=ReportSpec)
    stages: tuple[Stage, ...] = ()
    # The pace at which users read, for the token pacer and QoE (PASCAL, section V-A).
    tpot_target_s: float = READING_S
    # The `max_tokens` of every request.
    max_tokens: int = 32_768
    predictor: LengthPredictor | None = None
    future_load: FutureLoad | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if there are no instances or their ids are not distinct."""
        ids = [spec.instance_id for spec in self.instances]
        if not ids or len(set(ids)) != len(ids):
            raise ValueError("a cluster needs instances with distinct ids")

    @staticmethod
    def uniform(count: int, profile: Profile, **limits: object) -> ClusterSpec:
        """Return `count` equal instances i000, i001, ...; `limits` are fields of InstanceSpec."""
        return ClusterSpec.of_kinds([(profile, count)], **limits)

    @staticmethod
    def of_kinds(kinds: Iterable[tuple[Profile, int]], **limits: object) -> ClusterSpec:
        """Return instances i000, i001, ... of these profiles, so many of each; `limits` as in `uniform`."""
        profiles = [profile for profile, count in kinds for _ in range(count)]
        specs = (InstanceSpec(f"i{n:03d}", profile) for n, profile in enumerate(profiles))
        return ClusterSpec(tuple(replace(spec, **limits) for spec in specs))  # type: ignore[arg-type]

    def with_pools(self, pools: Sequence[Pool | None]) -> ClusterSpec:
        """Return the cluster with these initial pools, in the order of the instances. Raise ValueError for
        another count."""
        if len(pools) != len(self.instances):
            raise ValueError(f"{len(pools)} pools for {len(self.instances)} instances")
        pairs = zip(self.instances, pools, strict=True)
        return replace(self, instances=tuple(replace(spec, pool=pool) for spec, pool in pairs))
