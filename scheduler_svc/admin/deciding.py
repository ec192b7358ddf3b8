"""The policy that an operator asks for, checked."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from scheduler_svc.refused import Refused
from tailrace.policy.parameters import ParameterError, Value, format_value
from tailrace.policy.registry import UnknownPolicyError, UnusablePolicyError, all_parameters, load
from tailrace.records import PolicyRecord
from tailrace.slo import Slo
from tailrace.v1 import admin_pb2


def policy_record(request: admin_pb2.SetPolicyRequest, slo: Slo) -> PolicyRecord:
    """What is to be stored: a policy that can be had, with the given parameters in their types.

    Raises Refused.
    """
    try:
        load(request.name, parameters=dict(request.parameters), slo=slo)
        values = all_parameters(request.name, dict(request.parameters))
    except UnknownPolicyError as error:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"name: {error}") from error
    except UnusablePolicyError as error:
        raise Refused(grpc.StatusCode.FAILED_PRECONDITION, f"name: {error}") from error
    except ParameterError as error:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"parameters: {error}") from error
    return PolicyRecord(name=request.name, parameters={name: values[name] for name in request.parameters})


def parameter_words(parameters: Mapping[str, Value]) -> dict[str, str]:
    """As a user types them."""
    return {name: format_value(value) for name, value in parameters.items()}
