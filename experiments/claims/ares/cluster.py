"""ARES's cluster and the schedulers it compares (section 6.1), the same for every row.

One prefill instance per three decode instances, RTX 4090D, DeepSeek-R1-Distill-Qwen-7B in W8A8. Requests are
recomputed when memory runs out (section 1) and paused while they migrate (section 5.4). The link has 25
Gbit/s, the one bandwidth that the paper reports for a cluster (section 6.4). Workers report once per second,
the period of Algorithm 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from simulator.cluster import ClusterSpec, LengthPredictor, LinkSpec, MigrationSpec, ReportSpec
from simulator.setups import NoisyPredictor, OraclePredictor
from tailrace.actions import Action
from tailrace.cluster import ClusterView, Pool
from tailrace.perf.horizon import FutureLoad
from tailrace.policy.ares.policy import CURRENT_LOAD, OFF, Ares
from tailrace.policy.base import Policy
from tailrace.policy.static_pools import ROUND_ROBIN, StaticPools
from tailrace.profiles import load_profile


class TimedAres(Ares):
    """Ares with the duration of each tick recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.tick_s: list[float] = []

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        """Run Algorithm 1 and record its duration, which includes building the views that it accesses."""
        start = time.perf_counter()
        actions = super().on_tick(view, now)
        self.tick_s.append(time.perf_counter() - start)
        return actions


PROFILE: Final = "r1-distill-qwen-7b-w8a8-rtx4090d"
LINK_BYTES_PER_S: Final = 25e9 / 8.0


@dataclass(frozen=True, slots=True)
class Arm:
    """A scheduler of the comparison, and its workers' predictor."""

    policy: Callable[[], Policy]
    predictor: LengthPredictor | None = None


ARMS: Final[Mapping[str, Arm]] = {
    "round_robin": Arm(partial(StaticPools, dispatch=ROUND_ROBIN)),
    "vllm": Arm(partial(Ares, rescheduling=OFF)),
    "rescheduling": Arm(partial(Ares, rescheduling=CURRENT_LOAD)),
    "ares": Arm(Ares, NoisyPredictor()),
    "ares_oracle": Arm(TimedAres, OraclePredictor()),
}


def prefill_instances(instances: int) -> int:
    """Return one in four instances, as in the testbed and in figure 12."""
    return instances // 4


def cluster(instances: int, arm: Arm) -> ClusterSpec:
    """Return a cluster of a multiple of four instances, the first quarter of them for prefill."""
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
