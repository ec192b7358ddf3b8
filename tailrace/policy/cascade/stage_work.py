"""The work of a stage: whether its instances can keep up with its prefill and decoding.

Eq. (1) models the latencies of batches and has no limit on throughput. A step with B requests and K tokens
takes T = d0 + d1 B + d2 K and makes B tokens. At best an instance's KV or batch is full, so that a token of a
request with m tokens of context takes at least d0 max(m / capacity, 1 / slots) + d1 + d2 m seconds of an
instance. Adding prefill gives the work of a stage, in instance-seconds per second. A stage of k instances
with more work than k falls behind, whatever its batches are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.cluster import InstanceView
from tailrace.perf.qoe_model import Floats
from tailrace.policy.cascade.slowdown import Slowdown
from tailrace.policy.cascade.traffic import Traffic
from tailrace.policy.cascade.workload import Ints, bucket_of
from tailrace.profiles import Profile


@dataclass(frozen=True, slots=True)
class Engines:
    """The mean of a cluster's instances."""

    # Seconds of a prefill: per token, and per token squared.
    prompt_s: tuple[float, float]
    # Seconds of a decode step: base, per request, per KV token.
    step_s: tuple[float, float, float]
    kv_capacity_tokens: float
    # Maximum requests in a batch; infinite: unknown.
    slots: float

    @staticmethod
    def of(members: Sequence[InstanceView], profile: Profile) -> Engines:
        """Average the measured instances; if none was measured, use `profile`."""
        profiles = [i.measured.profile for i in members if i.measured is not None] or [profile]
        capacities = [i.kv_capacity_tokens for i in members if i.kv_capacity_tokens]
        slots = [i.max_num_seqs for i in members if i.max_num_seqs]
        prompt = [(p.prefill.ms_per_token, p.prefill.ms_per_token_squared) for p in profiles]
        step = [(p.decode.base_ms, p.decode.ms_per_request, p.decode.ms_per_kv_token) for p in profiles]
        per_token, per_square = np.mean(prompt, axis=0) / 1e3
        base, per_request, per_kv_token = np.mean(step, axis=0) / 1e3
        return Engines(
            (float(per_token), float(per_square)),
            (float(base), float(per_request), float(per_kv_token)),
            float(np.mean(capacities)) if capacities else float(profile.kv_capacity_tokens),
            float(np.mean(slots)) if slots else float("inf"),
        )


def stage_work(traffic: Traffic, edges: Ints, engines: Engines, slowdown: Slowdown) -> Floats:
    """Return the work [buckets + 1, buckets + 1] of each stage from one edge to another, in instances.

    A prompt is prefilled in the stage of its length, and a token is made in the stage of the request's length
    at that time. Raise ValueError for traffic of unknown rate, or without output.
    """
    if not traffic.seconds:
        raise ValueError("work needs the number of seconds in which the requests arrived")
    per_s = traffic.weights / traffic.seconds
    buckets = len(edges) - 1
    per_token, per_square = engines.prompt_s
    prompts_s = per_token * traffic.inputs + per_square * traffic.inputs**2
    prefill = np.bincount(bucket_of(edges, traffic.inputs), weights=per_s * prompts_s, minlength=buckets)
    # Tokens made per second, and the sum of their contexts, by bucket of length.
    tokens_per_s = float(per_s @ traffic.outputs)
    generated = traffic.in_flight(edges, tokens_per_s).sums
    prefill_between = _between(prefill)
    tokens, contexts = _between(generated[:, 0]), _between(generated[:, 3])
    base, per_request, per_kv_token = engines.step_s
    batches = np.maximum(contexts / engines.kv_capacity_tokens, tokens / engines.slots)
    decode = base * batches + per_request * tokens + per_kv_token * slowdown.attention * contexts
    return np.asarray(prefill_between + slowdown.step * decode, dtype=np.float64)


def _between(by_bucket: Floats | Ints) -> Floats:
    """Return the sums [buckets + 1, buckets + 1] from one edge to another."""
    prefix = np.concatenate([[0.0], np.cumsum(by_bucket)])
    return np.asarray(prefix[None, :] - prefix[:, None], dtype=np.float64)
