"""Results of a slice, with the same fields for the live fleet and the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.live.simulated.figures import Spread


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a slice. Times in seconds."""

    requests: int
    finished: int
    ttft: Spread
    tpot: Spread
    latency: Spread
    # Request -> the instance where it was first placed, if known.
    placed: Mapping[str, str]
    # Number of committed migrations by the policy's reason.
    migrations: Mapping[str, int]
    preemptions: int


@dataclass(frozen=True, slots=True)
class Machine:
    """How well the machine kept up with a live run. Times in seconds."""

    step_late_p50_s: float
    step_late_p99_s: float
    arrival_late_p99_s: float
    # Duration of an instance's decode step with a single request.
    step_s: float
    # CPU cores used by each part during the replay.
    busy: Mapping[str, float]

    @property
    def kept_up(self) -> bool:
        """Whether delays were small compared to a step, the unit of all latencies."""
        return self.step_late_p99_s < 0.5 * self.step_s and self.arrival_late_p99_s < self.step_s


@dataclass(frozen=True, slots=True)
class Placements:
    """Duration of placements in seconds."""

    # From a request's arrival at the front end to its submission: mostly the scheduler's round trip.
    added_p50_s: float
    added_p99_s: float
    # The policy alone.
    decided_p50_s: float
    decided_p99_s: float
