"""Validate what operators name and set."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import grpc

from scheduler_svc.admin.errors import AdminError
from tailrace.cluster import RequestView, Stage, StagesError, UnknownStageInstance, check_stages
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.policy.parameters import ParameterError, Value, format_value
from tailrace.policy.registry import UnknownPolicyError, UnusablePolicyError, all_parameters, choose, load
from tailrace.records import PolicyRecord
from tailrace.request_ids import matching
from tailrace.slo import Slo
from tailrace.v1 import admin_pb2, types_pb2

_IDS_SHOWN: Final = 3


def find_request(state: ReportedCluster, text: str) -> RequestView:
    """Return the running request with this id, or the only one whose id contains the text, or that its client
    calls so.

    Raise AdminError: INVALID_ARGUMENT for an empty or ambiguous text, NOT_FOUND.
    """
    if not text:
        raise AdminError(grpc.StatusCode.INVALID_ARGUMENT, "request_id: must not be empty")
    exact = state.request(text)
    if exact is not None:
        return exact
    requests = {request.request_id: request for request in state.requests()}
    matches = [requests[request_id] for request_id in matching(text, requests)]
    if not matches:
        raise AdminError(grpc.StatusCode.NOT_FOUND, f"request_id: no running request {text!r}")
    if len(matches) > 1:
        more = f" and {len(matches) - _IDS_SHOWN} more" if len(matches) > _IDS_SHOWN else ""
        shown = ", ".join(r.request_id for r in matches[:_IDS_SHOWN])
        raise AdminError(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"request_id: {text!r} is part of several request ids: {shown}{more}",
        )
    return matches[0]


def check_instance(state: ReportedCluster, field: str, instance_id: str) -> None:
    """Check that the instance exists. Raise AdminError: INVALID_ARGUMENT or NOT_FOUND."""
    if not instance_id:
        raise AdminError(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: must not be empty")
    if state.tracked(instance_id) is None:
        known = ", ".join(state.view().instances) or "none"
        raise AdminError(
            grpc.StatusCode.NOT_FOUND, f"{field}: no instance {instance_id!r}; there are: {known}"
        )


def check_drained(state: ReportedCluster, drained: Collection[str], instance_id: str) -> None:
    """Check that the instance exists, or that a drain of it is left. Raise AdminError as check_instance
    does."""
    if instance_id in drained:
        return
    try:
        check_instance(state, "instance_id", instance_id)
    except AdminError as error:
        named = ", ".join(sorted(drained)) or "none"
        raise AdminError(error.code, f"{error.details}; drained: {named}") from error


def policy_record(request: admin_pb2.SetPolicyRequest, slo: Slo) -> PolicyRecord:
    """Return the record to store: an installed policy, with the order that was named, and its parameters as
    typed values. Raise AdminError."""
    try:
        load(request.name, parameters=dict(request.parameters), slo=slo)
        values = all_parameters(request.name, dict(request.parameters))
        given = {**choose(request.name).parameters, **request.parameters}
    except UnknownPolicyError as error:
        raise AdminError(grpc.StatusCode.INVALID_ARGUMENT, f"name: {error}") from error
    except UnusablePolicyError as error:
        raise AdminError(grpc.StatusCode.FAILED_PRECONDITION, f"name: {error}") from error
    except ParameterError as error:
        raise AdminError(grpc.StatusCode.INVALID_ARGUMENT, f"parameters: {error}") from error
    name = request.name.split()[0]
    return PolicyRecord(name=name, parameters={parameter: values[parameter] for parameter in given})


def check_slo(record: PolicyRecord, slo: Slo) -> None:
    """Check that this policy plans for these SLOs. Raise AdminError."""
    try:
        load(record.name, parameters=record.parameters, slo=slo)
    except (UnknownPolicyError, UnusablePolicyError, ParameterError) as error:
        raise AdminError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"slo: not for the policy in force: {error}; to change both, set policy least_loaded first",
        ) from error


def format_parameters(parameters: Mapping[str, Value]) -> dict[str, str]:
    """Return the parameters as a user types them."""
    return {name: format_value(value) for name, value in parameters.items()}


def read_stages(state: ReportedCluster, messages: Sequence[types_pb2.Stage]) -> tuple[Stage, ...]:
    """Return the stages; ranges must ascend without overlap, each with known instances. [] removes all
    stages.

    Raise AdminError that names the field.
    """
    stages = tuple(Stage(each.lo, each.hi, tuple(each.instance_ids)) for each in messages)
    known = state.view().instances
    try:
        check_stages(stages, known)
    except UnknownStageInstance as error:
        names = ", ".join(known) or "none"
        raise AdminError(grpc.StatusCode.NOT_FOUND, f"{error}; there are: {names}") from error
    except StagesError as error:
        raise AdminError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
    return stages
