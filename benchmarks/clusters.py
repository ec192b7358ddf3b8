"""Clusters of any size as the scheduler would see them, for timing decisions."""

from __future__ import annotations

from functools import cache
from random import Random
from types import MappingProxyType

from tailrace.cluster import Arrival, ClusterView, InstanceView, Phase, RequestState, RequestView
from tailrace.control.reported_requests import ReportedRequests, ReportedRows
from tailrace.perf.horizon import FutureLoad
from tailrace.perf.remaining import expected_remaining
from tailrace.v1.monitor_pb2 import RequestColumns

REQUESTS_PER_INSTANCE = 100
# One in this many requests is behind its user's pace, so that some instances miss their SLO.
_BEHIND_ONE_IN = 400


@cache
def cluster(instances: int, seed: int = 0) -> ClusterView:
    """Return a cluster of decoding instances with 100 requests each.

    Prompts and outputs are heavy-tailed, loads differ, and every field that workers can report is set.
    """
    random = Random(seed)
    views = (_instance(random, f"i{n:04d}") for n in range(instances))
    return ClusterView(MappingProxyType({view.instance_id: view for view in views}))


def arrivals(count: int, seed: int = 1) -> list[Arrival]:
    """Return requests to place."""
    random = Random(seed)
    return [Arrival(f"new-{n}", _heavy_tailed(random, 300.0), 32_768, n) for n in range(count)]


def _instance(random: Random, name: str) -> InstanceView:
    scale = random.uniform(0.7, 1.3)
    requests = tuple(_request(random, f"{name}-{n}", name, scale) for n in range(REQUESTS_PER_INSTANCE))
    context = sum(r.context_tokens for r in requests)
    return InstanceView(
        instance_id=name,
        kv_capacity_tokens=400_000,
        kv_used_tokens=min(400_000, sum(r.kv_tokens for r in requests)),
        max_model_len=131_072,
        running=len(requests),
        prefill_backlog_tokens=random.randrange(2_000),
        context_tokens=context,
        token_interval_s=random.uniform(0.015, 0.03),
        host_kv_capacity_tokens=1_000_000,
        future_load=FutureLoad()([(r.context_tokens, expected_remaining(r)) for r in requests]),
        # As in the live scheduler, which does not count the requests again for each decision.
        requests=ReportedRequests(
            ReportedRows(name, 16, 131_072, RequestColumns()),
            {request.request_id: request for request in requests},
            (),
        ),
    )


def _request(random: Random, request_id: str, instance_id: str, scale: float) -> RequestView:
    prompt, output = _heavy_tailed(random, 300.0), int(scale * _heavy_tailed(random, 1_200.0))
    reasoning = random.random() < 0.6
    context = prompt + output
    return RequestView(
        request_id=request_id,
        instance_id=instance_id,
        phase=Phase.REASONING if reasoning else Phase.ANSWERING,
        state=RequestState.RUNNING,
        prompt_tokens=prompt,
        output_tokens=output,
        max_tokens=32_768,
        kv_tokens=-(-context // 16) * 16,
        # As if each had made a token in 20 ms.
        arrival_s=-0.02 * output,
        pacer_slack_tokens=None if reasoning else (-2.0 if random.randrange(_BEHIND_ONE_IN) == 0 else 8.0),
        predicted_remaining_tokens=float(_heavy_tailed(random, 1_200.0)),
        phase_tokens=output if reasoning else random.randrange(2_000),
    )


def _heavy_tailed(random: Random, median: float) -> int:
    return max(1, min(30_000, int(median * random.lognormvariate(0.0, 1.0))))
