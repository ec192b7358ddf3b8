"""vLLM 0.32's engine-core protocol for processes that do not import vLLM.

vLLM's API server and its engine core exchange ZMQ messages of msgpack: requests one way, outputs the other.
The structs here mirror vLLM's field by field, in its order (vllm/v1/engine/__init__.py). Fields that nobody
reads here stay raw bytes, so that a message that is read, split and written again loses nothing. A test
compares all of it with the installed vLLM.
"""

from tailrace.wire.outputs import (
    NIL,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    detach_buffers,
    encode_outputs,
    error_outputs,
    filter_outputs,
    read_outputs,
    rename_output,
    rename_outputs,
    shrink_outputs,
    split_outputs,
    stats_outputs,
    without_statistics,
)
from tailrace.wire.readable import check_outputs
from tailrace.wire.ready import (
    ENGINE_IDENTITY,
    ReadyResponse,
    read_ready,
    write_ready,
)
from tailrace.wire.requests import (
    EngineCoreRequest,
    OfTenant,
    RequestHead,
    RequestType,
    SamplingParams,
    UtilityCall,
    for_engines,
    pace_in,
    read_abort,
    read_full_request,
    read_request,
    read_utility,
    trace_context,
    utility_failure,
    utility_result,
)

__all__ = [
    "ENGINE_IDENTITY",
    "NIL",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "FinishReason",
    "OfTenant",
    "ReadyResponse",
    "RequestHead",
    "RequestType",
    "SamplingParams",
    "UtilityCall",
    "check_outputs",
    "detach_buffers",
    "encode_outputs",
    "error_outputs",
    "filter_outputs",
    "for_engines",
    "pace_in",
    "read_abort",
    "read_full_request",
    "read_outputs",
    "read_ready",
    "read_request",
    "read_utility",
    "rename_output",
    "rename_outputs",
    "shrink_outputs",
    "split_outputs",
    "stats_outputs",
    "trace_context",
    "utility_failure",
    "utility_result",
    "without_statistics",
    "write_ready",
]
