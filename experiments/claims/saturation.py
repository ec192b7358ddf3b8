"""The measure of load for claims whose rates a paper leaves open.

An instance whose KV is full on average works at its limit: further requests would only wait. With S the
context of a request summed over its decode steps, E[sum_k (prompt + k)], each step serves K tokens of it, K
being the KV capacity, to B = K E[output] / S requests. So a request costs an instance S / K steps of T = base
+ per_request B + per_kv_token K, and its prefill. This is a fluid limit, which no policy exceeds for long.

Means are those of the requests actually sent, since heavy-tailed traces differ from one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from simulator.request import SimRequest
from simulator.workloads.arrivals import poisson_requests
from simulator.workloads.lengths import DrawLengths
from tailrace.profiles import Profile


def saturation_rate(profile: Profile, requests: Sequence[SimRequest], instances: int) -> float:
    """Return the rate, in requests per second with lengths like those of `requests`, at which the KV of
    `instances` is full."""
    prompt = np.array([r.prompt_tokens for r in requests], np.float64)
    output = np.array([r.output_tokens for r in requests], np.float64)
    capacity = profile.kv_capacity_tokens
    context_steps = float((prompt * output + output * output / 2.0).mean())
    batch = capacity * float(output.mean()) / context_steps
    decode = profile.decode
    step_ms = decode.base_ms + decode.ms_per_request * batch + decode.ms_per_kv_token * capacity
    request_ms = context_steps / capacity * step_ms + profile.prefill.ms_per_token * float(prompt.mean())
    return instances * 1e3 / request_ms


def poisson_at_load(
    name: str, draw: DrawLengths, count: int, load: float, seed: int, profile: Profile, instances: int
) -> list[SimRequest]:
    """Generate `count` requests arriving at `load` times their own saturation rate, the same ones for every
    load."""
    requests = poisson_requests(name, draw, count, 1.0, seed)
    rate = load * saturation_rate(profile, requests, instances)
    return [replace(request, arrival_s=request.arrival_s / rate) for request in requests]
