"""Serve one test point: a scheduler under heavy load, as seen by its users and its operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from experiments.claims.base import Figures
from experiments.claims.cascade.cluster import cluster, llama_on_h20, policy_for, requests
from simulator.goodput import attainment
from simulator.records import MigrationOutcome, RequestRecord
from simulator.request import SimRequest
from simulator.setups import setup_for
from simulator.simulation import simulate
from tailrace.profiles import Profile
from tailrace.slo import Slo

# Factors of the SLO in section 6.4.
SLO_SCALES: Final = (5, 20)
# Share of the arrivals; later ones keep the cluster full while the others end.
MEASURED_UNTIL: Final = 7 / 8


def serve(policy: str, penalty: str, load: float, seconds: float, warm_up: float, seed: int) -> Figures:
    """Return latencies in seconds (normalized: per output token), and throughput in output tokens per second.

    `warm_up` is the share of the arrivals that fill the cluster and are not counted.

    `kept_up` is tokens made over tokens of the requests that arrived, during the measurement; below 1 by more
    than chance, requests pile up. `ttft_growth` is the mean TTFT of their second half over that of the first.
    """
    profile = llama_on_h20()
    arriving = requests(profile, load, seconds, seed)
    decider = policy_for(policy, profile, penalty, load)
    result = simulate(cluster(profile, policy, penalty), arriving, decider, setup_for(policy).intra())
    count = len(arriving)
    first, last = (int(share * count) for share in (warm_up, MEASURED_UNTIL))
    begin_s, until_s = arriving[first].arrival_s, arriving[last].arrival_s
    # Requests that arrived during the measurement; all are served to the end.
    done = [r for r in result.requests if begin_s <= r.arrival_s < until_s and r.finish_s is not None]
    ttft = np.array([r.ttft_s for r in done], dtype=np.float64)
    tpot = np.array([r.tpot_s for r in done], dtype=np.float64)
    latency = np.array([r.latency_s for r in done], dtype=np.float64)
    made = generated(result.requests, until_s) - generated(result.requests, begin_s)
    demanded = sum(request.output_tokens for request in arriving[first:last])
    half = len(ttft) // 2
    stages = [change.stages for change in result.series.stages if change.at_s <= until_s][-1]
    committed = [m for m in result.migrations if m.outcome is MigrationOutcome.COMMITTED]
    figures: dict[str, float | Sequence[float]] = {
        "measured": float(len(done)),
        "rate_per_s": (last - first) / (until_s - begin_s),
        "ttft_mean_s": float(ttft.mean()),
        "ttft_longest_share": longest_share(done),
        "ttft_growth": float(ttft[half:].mean() / ttft[:half].mean()),
        "ttft_p95_s": float(np.percentile(ttft, 95)),
        "tpot_mean_s": float(tpot.mean()),
        "tpot_p95_s": float(np.percentile(tpot, 95)),
        "normalized_s": float((latency / [r.output_tokens for r in done]).mean()),
        "tokens_per_s": made / (until_s - begin_s),
        "kept_up": made / demanded,
        "stages": float(max(1, len(stages))),
        "boundaries": [float(stage.hi) for stage in stages[:-1]],
        "stage_instances": [float(len(stage.instance_ids)) for stage in stages],
        "migrations": float(len(committed)),
    }
    for scale in SLO_SCALES:
        figures[f"attainment_{scale}x"] = attainment(done, minimum_load_slo(profile, arriving, scale))
    return figures


def longest_share(records: Sequence[RequestRecord]) -> float:
    """Return the share of all time to first tokens that is due to the 5% of requests with the longest
    prompts."""
    waits = [(r.prompt_tokens, r.ttft_s) for r in records if r.ttft_s is not None]
    waits.sort()
    total = sum(wait_s for _, wait_s in waits)
    return sum(wait_s for _, wait_s in waits[-max(1, len(waits) // 20) :]) / total


def generated(records: Sequence[RequestRecord], until_s: float) -> float:
    """Return the output tokens made until then; a running request is assumed to have made its tokens
    evenly."""
    tokens = 0.0
    for record in records:
        first_s, last_s = record.first_token_s, record.finish_s
        if first_s is None or last_s is None or first_s > until_s:
            continue
        share = 1.0 if last_s <= until_s else (until_s - first_s) / (last_s - first_s)
        tokens += record.output_tokens * share
    return tokens


def minimum_load_slo(profile: Profile, arriving: Sequence[SimRequest], scale: float) -> Slo:
    """Return an SLO of `scale` times the TTFT and TPOT of one request of mean lengths alone (section 6.4)."""
    prompt = round(sum(r.prompt_tokens for r in arriving) / len(arriving))
    output = round(sum(r.output_tokens for r in arriving) / len(arriving))
    ttft_ms = profile.prefill.base_ms + profile.prefill.ms(0, prompt)
    tpot_ms = profile.step_ms(0.0, 1, prompt + output // 2)
    return Slo(scale * ttft_ms / 1e3, scale * tpot_ms / 1e3)
