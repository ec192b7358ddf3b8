"""The fleet for a slice: as settings of workers, and as the simulator's cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from simulator.cluster import ClusterSpec, InstanceSpec, LinkSpec, MigrationSpec, ReportSpec
from simulator.setups import OraclePredictor
from tailrace.actions import WhenFull
from tailrace.cluster import Pool
from tailrace.perf.horizon import FutureLoad
from tailrace.profiles import Profile, load_profile
from tailrace.slo import DEFAULT_TPOT_S, READING_S
from worker_agent.engine.simulated.settings import at_speed
from worker_agent.speeds import Speeds

BLOCK_TOKENS: Final = 16
STEP_TOKENS: Final = 2048
# Seconds between two periodic reports: the workers' default.
REPORT_S: Final = 0.5
HOST_KV_BYTES: Final = 4 << 30


@dataclass(frozen=True, slots=True)
class FleetShape:
    """A fleet of equal instances. `speed`: step times are those of the profile divided by this."""

    workers: int
    profile: str
    speed: float
    # Maximum requests in a batch, and KV blocks.
    seats: int
    kv_blocks: int
    # The max_tokens of every request.
    max_tokens: int
    reasons: bool
    # Instances in the prefill pool, for policies with pools.
    prefill_instances: int

    @property
    def names(self) -> list[str]:
        """The IDs of the instances."""
        return [f"worker-{n}" for n in range(self.workers)]

    @property
    def slowed(self) -> Profile:
        """The profile with the step times of this fleet."""
        return at_speed(load_profile(self.profile), self.speed)

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens: all of the KV."""
        return self.kv_blocks * BLOCK_TOKENS

    def pools(self) -> dict[str, Pool]:
        """Return the initial pools, for policies with pools."""
        return {
            name: Pool.PREFILL if n < self.prefill_instances else Pool.DECODE
            for n, name in enumerate(self.names)
        }

    def engine_arguments(self) -> dict[str, object]:
        """Return the settings of the simulated engines."""
        return {
            "profile": self.profile,
            "speed": self.speed,
            "kv_blocks": self.kv_blocks,
            "block_tokens": BLOCK_TOKENS,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.seats,
            "max_num_batched_tokens": STEP_TOKENS,
            "host_kv_bytes": HOST_KV_BYTES,
            # Requests of a trace without reasoning tokens do not reason.
            "reasoning_mean_tokens": 1 if self.reasons else 0,
            # Lengths are predicted exactly, live and simulated: the predictor is not compared.
            "prediction_error": 0.0,
        }


@dataclass(frozen=True, slots=True)
class Delays:
    """Delays of the control plane in seconds: measured on the live fleet, used in the simulator."""

    # From a phase change or report on an instance to the policy.
    report_s: float
    # From a migration's start to its first byte, and from its last byte to the first step on the target.
    open_s: float
    commit_s: float


def simulated_cluster_spec(
    shape: FleetShape, delays: Delays, when_full: WhenFull, pooled: bool
) -> ClusterSpec:
    """Return the same fleet for the simulator.

    Migrations are as in the live services: three per instance and direction; a target without room acts as
    the policy specifies (`when_full`). Live simulated engines send very few bytes, so the link is free, and
    only the handshakes of a migration take time.
    """
    profile = shape.slowed
    instance = InstanceSpec(
        "",
        profile,
        kv_capacity_tokens=shape.kv_blocks * BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        host_kv_bytes=HOST_KV_BYTES,
        max_num_seqs=shape.seats,
        chunk_budget_tokens=STEP_TOKENS,
        max_model_len=shape.max_model_len,
        max_running_tokens=Speeds.of(profile, DEFAULT_TPOT_S).max_running_tokens,
    )
    pools = shape.pools() if pooled else {}
    return ClusterSpec(
        tuple(replace(instance, instance_id=name, pool=pools.get(name)) for name in shape.names),
        link=LinkSpec(bytes_per_s=1e15, latency_s=0.0),
        migration=MigrationSpec(
            when_full=when_full, room_last=True, open_s=delays.open_s, commit_s=delays.commit_s
        ),
        report=ReportSpec(REPORT_S, delays.report_s),
        tpot_target_s=READING_S,
        max_tokens=shape.max_tokens,
        predictor=OraclePredictor(),
        future_load=FutureLoad(),
    )
