"""ARES's cluster and the schedulers that it compares (section 6.1), the same for every row.

One prefill instance to three decode instances, RTX 4090D, DeepSeek-R1-Distill-Qwen-7B in W8A8; out of
memory means recomputing (section 1); the request that migrates is paused (section 5.4); 25 Gbit/s, the one
bandwidth that the paper gives for a cluster (section 6.4). Workers report once a second, as often as
Algorithm 1 runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from simulator.cluster import ClusterSpec, LinkSpec, MigrationSpec, ReportSpec
from simulator.hooks import LengthPredictor
from simulator.predictors import NoisyPredictor, OraclePredictor
from tailrace.actions import Action
from tailrace.cluster import ClusterView, Pool
from tailrace.perf.future_load import FutureLoad
from tailrace.policy.ares.policy import DISPATCH_ALONE, NO_PREDICTION, Ares
from tailrace.policy.arrow.baselines import IN_TURN
from tailrace.policy.base import Policy
from tailrace.profiles import load_profile


class TimedAres(Ares):
    """Decides as Ares does, and notes how long each tick took."""

    def __init__(self) -> None:
        super().__init__()
        self.tick_s: list[float] = []

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        """Algorithm 1, timed; the simulator makes the views of requests that it looks at meanwhile."""
        start = time.perf_counter()
        actions = super().on_tick(view, now)
        self.tick_s.append(time.perf_counter() - start)
        return actions


PROFILE: Final = "r1-distill-qwen-7b-w8a8-rtx4090d"
LINK_BYTES_PER_S: Final = 25e9 / 8.0


@dataclass(frozen=True, slots=True)
class Arm:
    """A scheduler of the comparison, and what its workers predict."""

    policy: Callable[[], Policy]
    predictor: LengthPredictor | None = None


ARMS: Final[Mapping[str, Arm]] = {
    "round_robin": Arm(IN_TURN.make),
    "vllm": Arm(DISPATCH_ALONE.make),
    "rescheduling": Arm(NO_PREDICTION.make),
    "ares": Arm(Ares, NoisyPredictor()),
    "ares_oracle": Arm(TimedAres, OraclePredictor()),
}


def prefill_instances(instances: int) -> int:
    """One in four, as in the testbed and in figure 12."""
    return instances // 4


def cluster(instances: int, arm: Arm) -> ClusterSpec:
    """A multiple of four instances, the first quarter of them for prefill."""
    spec = ClusterSpec.uniform(instances, load_profile(PROFILE), host_kv_bytes=0)
    prefill = prefill_instances(instances)
    pools = [Pool.PREFILL] * prefill + [Pool.DECODE] * (instances - prefill)
    return replace(
        spec.with_pools(pools),
        link=LinkSpec(bytes_per_s=LINK_BYTES_PER_S),
        migration=MigrationSpec(max_rounds=0),
        report=ReportSpec(interval_s=1.0),
        predictor=arm.predictor,
        future_load=None if arm.predictor is None else FutureLoad(),
    )
