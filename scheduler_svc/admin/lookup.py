"""Find what an operator names."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import grpc

from scheduler_svc.refused import Refused
from tailrace.cluster import RequestView
from tailrace.control.reported_cluster import ReportedCluster

_SHOWN: Final = 3


def find_request(state: ReportedCluster, text: str) -> RequestView:
    """The one running request with this id, or the only one whose id has this part.

    Raises Refused: INVALID_ARGUMENT for an empty or ambiguous text, NOT_FOUND.
    """
    if not text:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "request_id: must not be empty")
    exact = state.request(text)
    if exact is not None:
        return exact
    matches = sorted((r for r in state.requests() if text in r.request_id), key=lambda r: r.request_id)
    if not matches:
        raise Refused(grpc.StatusCode.NOT_FOUND, f"request_id: no running request {text!r}")
    if len(matches) > 1:
        more = f" and {len(matches) - _SHOWN} more" if len(matches) > _SHOWN else ""
        shown = ", ".join(r.request_id for r in matches[:_SHOWN])
        raise Refused(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"request_id: {text!r} is part of several request ids: {shown}{more}",
        )
    return matches[0]


def check_instance(state: ReportedCluster, field: str, instance_id: str) -> None:
    """Whether there is such an instance. Raises Refused: INVALID_ARGUMENT, NOT_FOUND."""
    if not instance_id:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: must not be empty")
    if state.tracked(instance_id) is None:
        known = ", ".join(state.view().instances) or "none"
        raise Refused(grpc.StatusCode.NOT_FOUND, f"{field}: no instance {instance_id!r}; there are: {known}")


def check_drained(state: ReportedCluster, drained: Collection[str], instance_id: str) -> None:
    """Whether there is such an instance, or a drain of one that is gone. Raises Refused as check_instance."""
    if instance_id in drained:
        return
    try:
        check_instance(state, "instance_id", instance_id)
    except Refused as error:
        named = ", ".join(sorted(drained)) or "none"
        raise Refused(error.code, f"{error.details}; drained: {named}") from error
