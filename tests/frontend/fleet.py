"""Membership of a fleet without etcd."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from tailrace.cluster import Pool
from tailrace.records import InstanceRecord, ServiceRecord
from tailrace.rollout.record import RolloutRecord


def record(instance_id: str, address: str) -> InstanceRecord:
    """Return the record of a freshly started instance with an arbitrary engine."""
    return InstanceRecord(
        instance_id=instance_id,
        incarnation=uuid.uuid4().hex,
        address=address,
        stream_address=address,
        engine="scripted",
        model="tiny",
        model_fingerprint="none",
        block_tokens=16,
        kv_blocks_total=1024,
        max_model_len=8192,
        max_num_seqs=64,
        kv_bytes_per_token=1,
        started_s=0.0,
    )


class StaticMembers:
    """Membership that a test edits directly."""

    def __init__(self) -> None:
        self.instances: dict[str, InstanceRecord] = {}
        self.services: dict[tuple[str, str], ServiceRecord] = {}
        self.leaders: dict[str, ServiceRecord] = {}
        self.pools: dict[str, Pool] = {}
        self.draining: frozenset[str] = frozenset()
        self.leaving: frozenset[str] = frozenset()
        self.suspects: frozenset[str] = frozenset()
        self.rollouts: dict[str, RolloutRecord] = {}
        self.unread_rollouts: frozenset[str] = frozenset()
        self._listeners: list[Callable[[], None]] = []

    def add_listener(self, callback: Callable[[], None]) -> None:
        self._listeners.append(callback)

    def changed(self) -> None:
        """Notify the listeners of a change."""
        for callback in self._listeners:
            callback()
