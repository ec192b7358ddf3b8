"""Utility calls of the API server: sent to every instance, answered once.

To the API server, reset_prefix_cache, list_loras and the like address "the engine"; here that is the fleet.
The first success is the reply; if all instances fail, one failure is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from frontend_svc.links import Outbox, request_bytes
from tailrace.v1 import worker_pb2
from tailrace.wire.requests import UtilityCall, utility_failure, utility_result

log = logging.getLogger(__name__)

_DEADLINE_S: Final = 30.0
# Calls that may be pending at a time.
_CALLS_MAX: Final = 256
# Results that are the same for the whole fleet and its whole life; API servers request them when they start.
_CACHED: Final = frozenset({"get_supported_tasks"})
# Methods that make sense for a fleet. All others (sleep, pause_scheduler, collective_rpc, weight updates)
# control a single engine; carried out behind the scheduler's back they would strand streams.
FLEET_METHODS: Final = frozenset(
    {
        "add_lora",
        "get_supported_tasks",
        "list_loras",
        "pin_lora",
        "profile",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "reset_prefix_cache",
    }
)


class _Output(msgspec.Struct, array_like=True):
    """vLLM's UtilityOutput; result: (type information, value)."""

    call_id: int
    failure_message: str | None = None
    result: tuple[object, object] | None = None


class _Outputs(msgspec.Struct, array_like=True):
    """vLLM's EngineCoreOutputs up to its utility output."""

    engine_index: int
    outputs: msgspec.Raw
    scheduler_stats: msgspec.Raw
    timestamp: float
    utility_output: _Output


_decoder = msgspec.msgpack.Decoder(_Outputs)


@dataclass(slots=True)
class _PendingCall:
    call: UtilityCall
    frames: list[bytes]
    timer: asyncio.TimerHandle
    waiting_for: set[str] = field(default_factory=set)
    failure: Sequence[bytes] | None = None


class UtilityCalls:
    """Track pending calls. With no instance attached, a call waits for one within its deadline."""

    def __init__(self, outbox: Outbox, send_reply: Callable[[Sequence[bytes]], None]) -> None:
        """`send_reply` sends an output message to the API server."""
        self._outbox = outbox
        self._send_reply = send_reply
        self._pending: dict[int, _PendingCall] = {}
        self._cache: dict[str, object] = {}

    def call(self, call: UtilityCall, frames: Sequence[bytes]) -> None:
        """Send a call of the API server to every attached instance."""
        if call.method in self._cache:
            self._send_reply(utility_result(call.call_id, self._cache[call.method]))
            return
        if call.call_id in self._pending:
            log.error("the API server used call id %d twice", call.call_id)
            return
        if len(self._pending) >= _CALLS_MAX:
            self._send_reply(utility_failure(call.call_id, f"{_CALLS_MAX} calls are pending already"))
            return
        if call.method not in FLEET_METHODS:
            log.warning("refused the engine-core call %s: not available on a fleet", call.method)
            text = f"{call.method} controls a single engine and is not available on a fleet"
            self._send_reply(utility_failure(call.call_id, text))
            return
        timer = asyncio.get_running_loop().call_later(_DEADLINE_S, self._expire, call.call_id)
        self._pending[call.call_id] = pending = _PendingCall(call, list(frames), timer)
        for instance_id in self._outbox.attached():
            self._send(pending, instance_id)
        self._settle(pending)

    def instance_attached(self, instance_id: str) -> None:
        """Send calls that no instance has yet to this one."""
        for pending in self._pending.values():
            if not pending.waiting_for:
                self._send(pending, instance_id)

    def instance_lost(self, instance_id: str) -> None:
        """Stop waiting for an instance that was lost."""
        for pending in list(self._pending.values()):
            if instance_id in pending.waiting_for:
                pending.waiting_for.discard(instance_id)
                self._settle(pending)

    def result(self, instance_id: str, result: worker_pb2.UtilityResult) -> None:
        """Take an instance's reply; late ones are dropped."""
        pending = self._pending.get(result.call_id)
        if pending is None:
            return
        pending.waiting_for.discard(instance_id)
        frames = list(result.frames)
        try:
            output = _decoder.decode(frames[0]).utility_output
        except (msgspec.DecodeError, IndexError) as error:
            log.error("cannot read the reply of %s to %s: %s", instance_id, pending.call.method, error)
            self._settle(pending)
            return
        if output.call_id != pending.call.call_id:
            # vLLM's API server fails on a reply to a call that it did not make.
            log.error("the reply of %s to %s has another call's id", instance_id, pending.call.method)
            self._settle(pending)
        elif output.failure_message is not None or output.result is None:
            pending.failure = frames
            self._settle(pending)
        else:
            if pending.call.method in _CACHED:
                self._cache[pending.call.method] = output.result[1]
            self._finish(pending, frames)

    def close(self) -> None:
        """Cancel the timers."""
        for pending in self._pending.values():
            pending.timer.cancel()
        self._pending.clear()

    def _send(self, pending: _PendingCall, instance_id: str) -> None:
        size = request_bytes(pending.frames, 0)
        if size > (limit := self._outbox.max_message_bytes(instance_id)):
            if limit:
                text = f"the call has {size} bytes; {instance_id} takes {limit} at most"
                pending.failure = utility_failure(pending.call.call_id, text)
            return
        call = worker_pb2.UtilityCall(call_id=pending.call.call_id, frames=pending.frames)
        if self._outbox.send(instance_id, worker_pb2.AttachUp(utility=call)):
            pending.waiting_for.add(instance_id)

    def _settle(self, pending: _PendingCall) -> None:
        """Reply with the failure if no instance is left to reply; without a failure, wait for another
        instance."""
        if not pending.waiting_for and pending.failure is not None:
            self._finish(pending, pending.failure)

    def _expire(self, call_id: int) -> None:
        pending = self._pending[call_id]
        text = f"no instance answered {pending.call.method} within {_DEADLINE_S:g} s"
        self._finish(pending, pending.failure or utility_failure(call_id, text))

    def _finish(self, pending: _PendingCall, frames: Sequence[bytes]) -> None:
        del self._pending[pending.call.call_id]
        pending.timer.cancel()
        self._send_reply(frames)
