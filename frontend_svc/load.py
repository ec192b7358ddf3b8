"""What the API server's vLLM metrics show: this front end's requests, and the fleet's KV usage.

Dashboards add up `vllm:num_requests_running` and `vllm:num_requests_waiting` over all API servers, so a front
end shows its own requests: the sum is the fleet's. They average `vllm:kv_cache_usage_perc`, so it shows the
mean of the instances that it uses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from frontend_svc.streams import StreamTable
from tailrace.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that engines run and that wait, and the share of KV blocks in use, from 0 to 1."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


def load_of(table: StreamTable, engines: Mapping[str, worker_pb2.EngineState]) -> Load:
    """Return the load of a front end with these streams; `engines`: what instances said of theirs, by ID.

    That is up to a heartbeat old, may be of streams that have ended since, and may be wrong.
    """
    at_engines = sum(min(table.count_owned(name), engine.waiting) for name, engine in engines.items())
    waiting = len(table) - table.placed + at_engines
    usages = [min(1.0, max(0.0, e.kv_usage)) for e in engines.values() if math.isfinite(e.kv_usage)]
    return Load(len(table) - waiting, waiting, round(sum(usages) / max(1, len(usages)), 4))
