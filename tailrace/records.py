"""What Tailrace keeps in etcd, as JSON under /tailrace/<cluster>/. Per-request state is never there."""

from __future__ import annotations

import msgspec


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`instances/<id>`, leased: a worker that is a member of the fleet."""

    instance_id: str
    # Fresh at each start of the worker; tells a restarted worker from the one that died.
    incarnation: str
    # gRPC address, host:port.
    address: str
    # Where front ends attach (tailrace/service/message_stream.py), host:port.
    stream_address: str
    metrics_address: str = ""
    engine: str
    model: str
    # Digest of what two engines must share to exchange KV.
    model_fingerprint: str
    block_tokens: int
    kv_blocks_total: int
    max_model_len: int
    max_num_seqs: int
    kv_bytes_per_token: int
    started_s: float


class ServiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`services/<kind>/<id>`, leased: a scheduler, monitor, migration service or front end.

    `leader/<kind>` holds the ServiceRecord of the elected one.
    """

    kind: str
    service_id: str
    incarnation: str
    # gRPC address, host:port.
    address: str
    metrics_address: str = ""
    # Where users reach it (front ends only).
    http_address: str = ""


class StageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `stages`: lengths [lo, hi) in tokens and the instances that serve them."""

    lo: int
    hi: int
    instance_ids: list[str]
