"""What happens in the fleet during a run: pools as etcd tells of them, KV use of each instance."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final

from benchmarks.real.fleet import Counts, Fleet
from tailrace.cluster import Pool
from tailrace.v1 import migration_pb2, types_pb2

_SAMPLE_S: Final = 0.5


@dataclass(slots=True)
class Watched:
    """Filled while the block runs; `counts` and `migrations` when it has ended."""

    # (time.perf_counter, instance, from, to), as etcd's watch told it; the first assignment is no flip.
    flips: list[tuple[float, str, str, str]] = field(default_factory=list)
    # Variance over instances of the share of KV in use, one sample each half second with load.
    variances: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    counts: Counts | None = None
    migrations: list[migration_pb2.MigrationRecord] = field(default_factory=list)

    def committed(self) -> dict[str, int]:
        """Committed migrations by reason."""
        found: dict[str, int] = {}
        for record in self.migrations:
            if record.state == types_pb2.MIGRATION_STATE_COMMITTED:
                found[record.reason] = found.get(record.reason, 0) + 1
        return found

    @property
    def pauses_ms(self) -> list[float]:
        """Of committed migrations: while the request stood still."""
        committed = types_pb2.MIGRATION_STATE_COMMITTED
        return [record.pause_ms for record in self.migrations if record.state == committed]


@contextlib.asynccontextmanager
async def watching(fleet: Fleet) -> AsyncIterator[Watched]:
    """Watch for as long as the block takes."""
    watched = Watched()
    known = {record.migration_id for record in await fleet.migrations()}
    before = await fleet.counted()
    pools: dict[str, Pool] = dict(fleet.members.pools)
    open_ = True

    def look() -> None:
        if not open_:
            return
        now = dict(fleet.members.pools)
        for name, pool in now.items():
            if name in pools and pools[name] is not pool:
                watched.flips.append((time.perf_counter(), name, pools[name].value, pool.value))
        pools.clear()
        pools.update(now)

    fleet.members.add_listener(look)
    sampling = asyncio.create_task(_sample(fleet, watched), name="KV samples")
    try:
        yield watched
    finally:
        open_ = False
        sampling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampling
    watched.counts = (await fleet.counted()).since(before)
    watched.migrations = [r for r in await fleet.migrations() if r.migration_id not in known]


async def _sample(fleet: Fleet, watched: Watched) -> None:
    while True:
        shares = [i.kv_blocks_used / max(1, i.kv_blocks_total) for i in (await fleet.instances()).values()]
        if any(shares):
            watched.variances.append(statistics.pvariance(shares))
            watched.shares.append(statistics.fmean(shares))
        await asyncio.sleep(_SAMPLE_S)
