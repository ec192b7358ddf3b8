"""What came of a slice, in the same words for the live fleet and for the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.live.figures import Spread


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times in seconds."""

    requests: int
    finished: int
    ttft: Spread
    tpot: Spread
    latency: Spread
    # Request -> where it was placed first; those of whom it is known.
    placed: Mapping[str, str]
    # Committed ones by the policy's reason.
    migrations: Mapping[str, int]
    preemptions: int


@dataclass(frozen=True, slots=True)
class Machine:
    """How well the machine kept up with a live run. Times in seconds."""

    step_late_p50_s: float
    step_late_p99_s: float
    arrival_late_p99_s: float
    # A decode step of an instance that is alone with one request.
    step_s: float
    # Cores kept busy by each part while the slice was replayed.
    busy: Mapping[str, float]

    @property
    def kept_up(self) -> bool:
        """Lateness was small against what is measured: steps, of which every latency is made."""
        return self.step_late_p99_s < 0.5 * self.step_s and self.arrival_late_p99_s < self.step_s


@dataclass(frozen=True, slots=True)
class Placements:
    """What deciding took. Seconds."""

    # From a request's arrival at the front end to its submission: the scheduler's round trip, mostly.
    added_p50_s: float
    added_p99_s: float
    # The policy alone.
    decided_p50_s: float
    decided_p99_s: float
