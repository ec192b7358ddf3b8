"""The figures of one run of `bench-policies`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one policy at one rate with one seed. Times in seconds."""

    # Name of the scenario.
    ground: str
    share: float
    rate_per_s: float
    seed: int
    policy: str
    # Share of requests that met their SLOs; times the rate it is the goodput, in requests per second.
    attained: float
    goodput_per_s: float
    ttft_mean_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    qoe_missed: float
    preemptions: int
    migrations: int
