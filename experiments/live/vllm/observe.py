"""Observe the fleet during a run: pools in etcd, KV use of each instance."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final

from tailrace.cluster import Pool
from tailrace.v1 import migration_pb2, types_pb2
from tests.harness.vllm_fleet import Counts, Fleet

_SAMPLE_S: Final = 0.5


@dataclass(slots=True)
class Observations:
    """Filled during the block; `counts` and `migrations` at its end."""

    # (time.perf_counter, instance, from, to), as seen by a watch of etcd; the first assignment is not a flip.
    flips: list[tuple[float, str, str, str]] = field(default_factory=list)
    # Variance over instances of the share of KV in use, one sample every half second under load.
    variances: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    counts: Counts | None = None
    migrations: list[migration_pb2.MigrationRecord] = field(default_factory=list)

    def committed(self) -> dict[str, int]:
        """Return the number of committed migrations by reason."""
        found: dict[str, int] = {}
        for record in self.migrations:
            if record.state == types_pb2.MIGRATION_STATE_COMMITTED:
                found[record.reason] = found.get(record.reason, 0) + 1
        return found

    @property
    def pauses_ms(self) -> list[float]:
        """Pauses of the requests in committed migrations."""
        committed = types_pb2.MIGRATION_STATE_COMMITTED
        return [record.pause_ms for record in self.migrations if record.state == committed]


@contextlib.asynccontextmanager
async def observing(fleet: Fleet) -> AsyncIterator[Observations]:
    """Observe the fleet for the block."""
    observed = Observations()
    known = {record.migration_id for record in await fleet.migrations()}
    before = await fleet.counters()
    pools: dict[str, Pool] = dict(fleet.members.pools)
    active = True

    def record_flips() -> None:
        if not active:
            return
        now = dict(fleet.members.pools)
        for name, pool in now.items():
            if name in pools and pools[name] is not pool:
                observed.flips.append((time.perf_counter(), name, pools[name].value, pool.value))
        pools.clear()
        pools.update(now)

    fleet.members.add_listener(record_flips)
    sampling = asyncio.create_task(_sample(fleet, observed), name="KV samples")
    try:
        yield observed
    finally:
        active = False
        sampling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampling
    observed.counts = (await fleet.counters()).since(before)
    observed.migrations = [r for r in await fleet.migrations() if r.migration_id not in known]


async def _sample(fleet: Fleet, observed: Observations) -> None:
    while True:
        shares = [i.kv_blocks_used / max(1, i.kv_blocks_total) for i in (await fleet.instances()).values()]
        if any(shares):
            observed.variances.append(statistics.pvariance(shares))
            observed.shares.append(statistics.fmean(shares))
        await asyncio.sleep(_SAMPLE_S)
