"""A profile record as the admin API tells it."""

from __future__ import annotations

from tailrace.records import ProfileRecord
from tailrace.v1 import profile_pb2


def profile_message(record: ProfileRecord) -> profile_pb2.MeasuredProfile:
    """All of it."""
    profile, curve, qoe = record.profile, record.ttft, record.qoe
    return profile_pb2.MeasuredProfile(
        kind=record.kind,
        engine=record.engine,
        model=record.model,
        hardware=record.hardware,
        version=record.version,
        instance_id=record.instance_id,
        measured_s=record.measured_s,
        took_s=record.took_s,
        prefill=profile_pb2.PrefillFit(
            base_ms=profile.prefill.base_ms,
            ms_per_token=profile.prefill.ms_per_token,
            ms_per_token_squared=profile.prefill.ms_per_token_squared,
            error=record.prefill_error,
            samples=record.prefill_samples,
        ),
        decode=profile_pb2.DecodeFit(
            base_ms=profile.decode.base_ms,
            ms_per_request=profile.decode.ms_per_request,
            ms_per_kv_token=profile.decode.ms_per_kv_token,
            error=record.decode_error,
            samples=record.decode_samples,
        ),
        ttft=profile_pb2.TtftFit(
            base_s=curve.base_s,
            s_per_token=curve.per_token_s,
            s_per_token_squared=curve.per_token_squared_s,
            r_squared=curve.r_squared,
            samples=curve.samples,
        ),
        kv_bytes_per_token=profile.kv_bytes_per_token,
        kv_capacity_tokens=profile.kv_capacity_tokens,
        tpot_s=record.tpot_s,
        max_running_tokens=record.max_running_tokens,
        qoe=None if qoe is None else profile_pb2.QoeFit(d=qoe.d, error=qoe.error, samples=qoe.samples),
    )
