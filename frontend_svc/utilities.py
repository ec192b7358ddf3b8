"""The API server's calls of engine-core methods: asked of every instance, answered once.

reset_prefix_cache, list_loras and the like mean "the engine" to the API server; here that is the fleet. The
first success is the answer; if all fail, a failure's text.
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
from tailrace.wire import UtilityCall, utility_failure, utility_result

log = logging.getLogger(__name__)

_DEADLINE_S: Final = 30.0
# Calls that may be under way.
_CALLS_MAX: Final = 256
# The same for the whole fleet and for its whole life; asked by API servers at their start.
_CACHED: Final = frozenset({"get_supported_tasks"})
# Methods that mean the same of a fleet as of one engine. All others (sleep, pause_scheduler, collective_rpc,
# weight updates) control a single engine; carried out behind the scheduler's back they would strand streams.
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
    """vLLM's EngineCoreOutputs as far as its utility output."""

    engine_index: int
    outputs: msgspec.Raw
    scheduler_stats: msgspec.Raw
    timestamp: float
    utility_output: _Output


_decoder = msgspec.msgpack.Decoder(_Outputs)


@dataclass(slots=True)
class _Asked:
    call: UtilityCall
    frames: list[bytes]
    timer: asyncio.TimerHandle
    waiting_for: set[str] = field(default_factory=set)
    failure: Sequence[bytes] | None = None


class Utilities:
    """Calls under way. Waits, within the deadline, for a first instance when there is none."""

    def __init__(self, outbox: Outbox, answer: Callable[[Sequence[bytes]], None]) -> None:
        """`answer` sends an output message to the API server."""
        self._outbox = outbox
        self._answer = answer
        self._asked: dict[int, _Asked] = {}
        self._cache: dict[str, object] = {}

    def call(self, call: UtilityCall, frames: Sequence[bytes]) -> None:
        """The API server calls a method."""
        if call.method in self._cache:
            self._answer(utility_result(call.call_id, self._cache[call.method]))
            return
        if call.call_id in self._asked:
            log.error("the API server uses call id %d twice", call.call_id)
            return
        if len(self._asked) >= _CALLS_MAX:
            self._answer(utility_failure(call.call_id, f"{_CALLS_MAX} calls are under way already"))
            return
        if call.method not in FLEET_METHODS:
            log.warning("refused the engine-core call %s: not available on a fleet", call.method)
            text = f"{call.method} controls a single engine and is not available on a fleet"
            self._answer(utility_failure(call.call_id, text))
            return
        timer = asyncio.get_running_loop().call_later(_DEADLINE_S, self._expire, call.call_id)
        self._asked[call.call_id] = asked = _Asked(call, list(frames), timer)
        for instance_id in self._outbox.attached():
            self._send(asked, instance_id)
        self._settle(asked)

    def instance_attached(self, instance_id: str) -> None:
        """Calls that nobody was there to answer go to this one."""
        for asked in self._asked.values():
            if not asked.waiting_for:
                self._send(asked, instance_id)

    def instance_lost(self, instance_id: str) -> None:
        """It will not answer."""
        for asked in list(self._asked.values()):
            if instance_id in asked.waiting_for:
                asked.waiting_for.discard(instance_id)
                self._settle(asked)

    def result(self, instance_id: str, result: worker_pb2.UtilityResult) -> None:
        """An instance's answer; late ones are dropped."""
        asked = self._asked.get(result.call_id)
        if asked is None:
            return
        asked.waiting_for.discard(instance_id)
        frames = list(result.frames)
        try:
            output = _decoder.decode(frames[0]).utility_output
        except (msgspec.DecodeError, IndexError) as error:
            log.error("cannot read %s's answer to %s: %s", instance_id, asked.call.method, error)
            self._settle(asked)
            return
        if output.call_id != asked.call.call_id:
            # To vLLM's API server an answer to nothing is fatal.
            log.error("%s's answer to %s is another call's", instance_id, asked.call.method)
            self._settle(asked)
        elif output.failure_message is not None or output.result is None:
            asked.failure = frames
            self._settle(asked)
        else:
            if asked.call.method in _CACHED:
                self._cache[asked.call.method] = output.result[1]
            self._finish(asked, frames)

    def close(self) -> None:
        """Cancel the timers."""
        for asked in self._asked.values():
            asked.timer.cancel()
        self._asked.clear()

    def _send(self, asked: _Asked, instance_id: str) -> None:
        size = request_bytes(asked.frames, 0)
        if size > (limit := self._outbox.max_message_bytes(instance_id)):
            if limit:
                text = f"the call has {size} bytes; {instance_id} takes {limit} at most"
                asked.failure = utility_failure(asked.call.call_id, text)
            return
        call = worker_pb2.UtilityCall(call_id=asked.call.call_id, frames=asked.frames)
        if self._outbox.send(instance_id, worker_pb2.AttachUp(utility=call)):
            asked.waiting_for.add(instance_id)

    def _settle(self, asked: _Asked) -> None:
        """Nobody is left to answer: the failure is the answer; without one, wait for another instance."""
        if not asked.waiting_for and asked.failure is not None:
            self._finish(asked, asked.failure)

    def _expire(self, call_id: int) -> None:
        asked = self._asked[call_id]
        text = f"no instance answered {asked.call.method} within {_DEADLINE_S:g} s"
        self._finish(asked, asked.failure or utility_failure(call_id, text))

    def _finish(self, asked: _Asked, frames: Sequence[bytes]) -> None:
        del self._asked[asked.call.call_id]
        asked.timer.cancel()
        self._answer(frames)
