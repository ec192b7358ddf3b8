"""Membership of a fleet without etcd."""

from __future__ import annotations

import uuid

from tailrace.model_identity import identify_model
from tailrace.records import InstanceRecord
from tailrace.tiny import MODEL_PATH

MODEL = identify_model(str(MODEL_PATH))
"""What these instances run."""


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
        model_identity=MODEL,
        block_tokens=16,
        kv_blocks_total=1024,
        max_model_len=8192,
        max_num_seqs=64,
        kv_bytes_per_token=1,
        started_s=0.0,
    )
