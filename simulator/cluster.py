"""What is simulated: instances, links, host memory, reports and migration, all plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from simulator.hooks import FutureLoad, LengthPenalty, LengthPredictor
from tailrace.actions import WhenFull
from tailrace.cluster import Pool, Stage
from tailrace.profiles import Profile
from tailrace.slo import READING_S


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One instance: a model on a GPU and the limits of its engine."""

    instance_id: str
    profile: Profile
    # KV capacity of the device; None: the profile's.
    kv_capacity_tokens: int | None = None
    block_tokens: int = 16
    # KV that fits in host memory, of preempted requests first; 0: those are recomputed. 256 GiB: an eighth of
    # a server of 2 TiB with eight GPUs. Workers take 4 GiB unless told otherwise. The step that copies to or
    # from there waits, as the profile's `swap` has it.
    host_kv_bytes: int = 256 * 1024**3
    # Most requests in a batch, and most tokens of one step: decodes and prefill chunks together.
    max_num_seqs: int = 256
    chunk_budget_tokens: int = 2048
    max_model_len: int = 131_072
    # Most tokens in the batch that keep the TPOT SLO, as profiled (Arrow, section 5.4); None: not profiled.
    max_running_tokens: int | None = None
    pool: Pool | None = None
    penalty: LengthPenalty | None = None
    # Whether KV of prefixes is kept and found, where the workload names its blocks. vLLM does by default; the
    # papers' systems do not.
    prefix_caching: bool = False
    # Whether what the device evicts of them stays in host memory, in what preempted requests leave of it.
    host_caching: bool = False

    @property
    def kv_blocks(self) -> int:
        """KV blocks on the device."""
        tokens = (
            self.profile.kv_capacity_tokens if self.kv_capacity_tokens is None else self.kv_capacity_tokens
        )
        return tokens // self.block_tokens

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block."""
        return self.block_tokens * self.profile.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """The network: one full-duplex port an instance, shared equally by the transfers on it."""

    # 12.5e9: 100 Gbit/s.
    bytes_per_s: float = 12.5e9
    latency_s: float = 0.0005
    # Capacity of all transfers together; None: only ports limit (a non-blocking fabric).
    fabric_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class MigrationSpec:
    """Live migration in rounds (design, section 6), admitted as the live migration service does."""

    # Most at a time for one instance and direction; others wait.
    limit: int = 3
    # Migrations that may wait for admission in the whole cluster, and for how long, here and at the target.
    queue_limit: int = 256
    patience_s: float = 10.0
    when_full: WhenFull = WhenFull.WAIT
    # Whether the target is asked for room only once the migration has its place, as the live services do: one
    # that is refused or waits then has a place meanwhile. False: the papers', whose receivers agree first.
    room_last: bool = False
    # Pre-copy rounds while the source decodes on, before the last round that pauses the request.
    max_rounds: int = 4
    # Pause when no more than this many full blocks are left to copy.
    pause_blocks: int = 2
    # From its place to the first byte, and from the last byte to the first step on the target.
    open_s: float = 0.002
    commit_s: float = 0.001
    # One message of bid-ask between two instances, on average; each takes half to one and a half of it.
    message_s: float = 0.001


@dataclass(frozen=True, slots=True)
class ReportSpec:
    """How stale the policy's view is. interval_s 0: every view is exact at the time of the decision."""

    # 0.5: the workers' default.
    interval_s: float = 0.5
    # From an instance to the policy: steady reports and phase events.
    delay_s: float = 0.002


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A cluster to simulate."""

    instances: tuple[InstanceSpec, ...]
    link: LinkSpec = field(default_factory=LinkSpec)
    migration: MigrationSpec = field(default_factory=MigrationSpec)
    report: ReportSpec = field(default_factory=ReportSpec)
    stages: tuple[Stage, ...] = ()
    # The user's pace: what the token pacer and QoE go by (PASCAL, section V-A).
    tpot_target_s: float = READING_S
    # What requests are announced with as max_tokens.
    max_tokens: int = 32_768
    predictor: LengthPredictor | None = None
    future_load: FutureLoad | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for no instances or instance ids that are not distinct."""
        ids = [spec.instance_id for spec in self.instances]
        if not ids or len(set(ids)) != len(ids):
            raise ValueError("a cluster needs instances with distinct ids")

    @staticmethod
    def uniform(count: int, profile: Profile, **limits: object) -> ClusterSpec:
        """`count` equal instances i000, i001, ...; `limits` are fields of InstanceSpec."""
        template = replace(InstanceSpec("i000", profile), **limits)  # type: ignore[arg-type]
        return ClusterSpec(tuple(replace(template, instance_id=f"i{n:03d}") for n in range(count)))

    def with_pools(self, pools: Sequence[Pool | None]) -> ClusterSpec:
        """The same cluster with these pools at the start, in the order of the instances."""
        if len(pools) != len(self.instances):
            raise ValueError(f"{len(pools)} pools for {len(self.instances)} instances")
        pairs = zip(self.instances, pools, strict=True)
        return replace(self, instances=tuple(replace(spec, pool=pool) for spec, pool in pairs))
