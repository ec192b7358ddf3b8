"""Check stages that an operator gives."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from scheduler_svc.admin.lookup import check_instance
from scheduler_svc.refused import Refused
from tailrace.cluster import Stage
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.v1 import types_pb2


def read_stages(state: ReportedCluster, messages: Sequence[types_pb2.Stage]) -> tuple[Stage, ...]:
    """Ranges that follow each other without overlap, each with known instances; [] takes stages away.

    Raises Refused, naming the field.
    """
    stages: list[Stage] = []
    for number, message in enumerate(messages):
        field = f"stages[{number}]"
        if message.lo >= message.hi:
            raise _invalid(f"{field}.hi: {message.hi} must be greater than lo, {message.lo}")
        if stages and message.lo < stages[-1].hi:
            raise _invalid(
                f"{field}.lo: {message.lo} lies in the stage before, which ends at {stages[-1].hi}"
            )
        if not message.instance_ids:
            raise _invalid(f"{field}.instance_ids: must not be empty")
        for instance_id in message.instance_ids:
            check_instance(state, f"{field}.instance_ids", instance_id)
        stages.append(Stage(message.lo, message.hi, tuple(message.instance_ids)))
    return tuple(stages)


def _invalid(details: str) -> Refused:
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, details)
