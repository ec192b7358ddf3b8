"""vLLM's utility calls, which API servers make to a worker's engine core."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from vllm.v1.engine import EngineCoreOutputs, UtilityOutput, UtilityResult
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from worker_agent.engine.base import Frames
from worker_agent.engine.vllm.load import LoadedCore

# Accepted but not executed: adapters are evicted as needed, because each API server has its own numbering.
_ACCEPTED_ONLY = frozenset({"remove_lora", "pin_lora"})

_log = logging.getLogger(__name__)

# Calls that only read or clear a cache, or load adapters; not those that would stop, pause or reload an
# engine that other front ends share.
ALLOWED = frozenset(
    {
        "add_lora",
        "get_kv_cache_group_metadata",
        "get_supported_tasks",
        "get_weight_version",
        "is_scheduler_paused",
        "is_sleeping",
        "list_loras",
        "pin_lora",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "reset_prefix_cache",
    }
)


class UtilityCalls:
    """Runs utility calls on the engine thread, as vLLM's engine core process does."""

    def __init__(self, core: LoadedCore) -> None:
        self._core = core
        self._decoder = MsgpackDecoder()
        self._encoder = MsgpackEncoder()

    def call(self, call_id: int, frames: Frames) -> list[bytes]:
        """Run a call, encoded as (client index, call ID, method, arguments), and return vLLM's encoded
        EngineCoreOutputs with the result or the failure."""
        output = UtilityOutput(call_id)
        try:
            _, output.call_id, method, arguments = self._decoder.decode(frames)
            output.result = UtilityResult(self._run(method, arguments))
        # As in vLLM, any failure is reported to the caller.
        except Exception as error:  # noqa: BLE001
            _log.exception("utility call %d failed", call_id)
            output.failure_message = f"Call failed: {error}"
        return [bytes(frame) for frame in self._encoder.encode(EngineCoreOutputs(utility_output=output))]

    def _run(self, method: str, arguments: Sequence[object]) -> object:
        if method not in ALLOWED:
            raise PermissionError(f"{method} is not available on a fleet's worker")
        bound = getattr(self._core.core, method)
        arguments = EngineCoreProc._convert_msgspec_args(bound, arguments)
        if method == "add_lora":
            return bool(self._core.adapters.load(*arguments))
        if method in _ACCEPTED_ONLY:
            return True
        return bound(*arguments)
