"""Sample the time series of a simulation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulator.instance import Instance
from simulator.records import PoolChange, Series, StageChange
from tailrace.cluster import Stage


class Sampler:
    """Collect samples, each a row with a column per instance."""

    def __init__(self, instances: Sequence[Instance], stages: tuple[Stage, ...]) -> None:
        self._instances = instances
        self._times: list[float] = []
        self._rows: list[list[tuple[int, int, int, int, int, float]]] = []
        self._pools = [PoolChange(0.0, i.instance_id, i.pool) for i in instances]
        self._stages = [StageChange(0.0, stages)]

    def sample(self, now: float) -> None:
        """Take a sample of every instance."""
        self._times.append(now)
        self._rows.append([_sample(instance, now) for instance in self._instances])

    def pool_changed(self, instance: Instance, now: float) -> None:
        """Record the pool to which an instance was moved."""
        self._pools.append(PoolChange(now, instance.instance_id, instance.pool))

    def stages_changed(self, stages: tuple[Stage, ...], now: float) -> None:
        """Record a change of the stages."""
        self._stages.append(StageChange(now, stages))

    def series(self) -> Series:
        """Return all samples."""
        shape = (len(self._times), len(self._instances), 6)
        rows = np.array(self._rows, np.float64).reshape(shape)
        counts = rows.astype(np.int64)
        return Series(
            instance_ids=tuple(i.instance_id for i in self._instances),
            times_s=np.array(self._times, np.float64),
            kv_used_tokens=counts[:, :, 0],
            host_kv_tokens=counts[:, :, 1],
            decoding=counts[:, :, 2],
            prefilling=counts[:, :, 3],
            waiting=counts[:, :, 4],
            step_s=rows[:, :, 5],
            pools=tuple(self._pools),
            stages=tuple(self._stages),
        )


def _sample(instance: Instance, now: float) -> tuple[int, int, int, int, int, float]:
    size = instance.block_tokens
    return (
        instance.used_blocks_at(instance.boundary_at(now)) * size,
        instance.host_blocks * size,
        len(instance.decoding),
        len(instance.prefilling),
        len(instance.waiting) + len(instance.paused),
        instance.step_s,
    )
