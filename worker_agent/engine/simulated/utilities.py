"""Answers to vLLM's utility calls, as an engine core without these features gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from tailrace import wire
from worker_agent.engine.base import Frames

_ANSWERS: Final[Mapping[str, object]] = {
    "get_supported_tasks": ("generate",),
    "is_sleeping": False,
    "is_scheduler_paused": False,
    "reset_prefix_cache": True,
    "reset_mm_cache": None,
    "reset_encoder_cache": None,
    "list_loras": (),
    "profile": None,
}


def answer_utility(call_id: int, frames: Frames) -> list[bytes]:
    """vLLM's answer to this call, or its failure for a method that is not there."""
    try:
        method = wire.read_utility(frames).method
    except msgspec.DecodeError as error:
        return wire.utility_failure(call_id, f"malformed utility call: {error}")
    if method not in _ANSWERS:
        return wire.utility_failure(
            call_id, f"Call to {method} method failed: the simulated engine has no method {method!r}"
        )
    return wire.utility_result(call_id, _ANSWERS[method])
