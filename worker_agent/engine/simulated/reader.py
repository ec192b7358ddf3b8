"""Decoding of vLLM's request messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from tailrace import wire
from tailrace.cache.names import NO_KEYS, Naming
from tailrace.wire.cache_keys import read_cache_keys
from worker_agent.engine.base import Frames, RequestKey
from worker_agent.engine.errors import Unrunnable
from worker_agent.engine.simulated.kv import BlockChain
from worker_agent.engine.simulated.request import Request
from worker_agent.engine.simulated.script import Script, Vocabulary, opens_reasoning
from worker_agent.engine.simulated.settings import SimulatedSettings


class RequestReader:
    """Decodes requests for one engine."""

    def __init__(
        self, settings: SimulatedSettings, vocabulary: Vocabulary, naming: Naming, max_model_len: int
    ) -> None:
        self._settings = settings
        self._vocabulary = vocabulary
        self._naming = naming
        self._max_model_len = max_model_len

    def read(
        self,
        key: RequestKey,
        epoch: int,
        frames: Frames,
        output_token_ids: Sequence[int],
        frontend_id: str,
        traceparent: str,
    ) -> Request:
        """Decode a request. Raise Unrunnable."""
        try:
            message = wire.read_full_request(frames)
        except msgspec.DecodeError as error:
            raise Unrunnable(f"malformed request: {error}") from error
        sampling = message.sampling_params
        prompt = message.prompt_token_ids
        if sampling is None or not prompt:
            raise Unrunnable("the simulated engine continues prompts of token ids only")
        if sampling.prompt_logprobs is not None:
            raise Unrunnable("the simulated engine has no prompt log probabilities")
        room = self._max_model_len - len(prompt)
        if room <= 0:
            raise Unrunnable(f"a prompt of {len(prompt)} tokens, of at most {self._max_model_len - 1}")
        try:
            script = Script(prompt, sampling, self._settings, self._vocabulary)
        except ValueError as error:
            raise Unrunnable(str(error)) from error
        cache_keys = read_cache_keys(frames)
        outputs = list(output_token_ids)
        limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        end_think = self._vocabulary.end_think
        return Request(
            key=key,
            request_id=message.request_id,
            epoch=epoch,
            frames=frames,
            frontend_id=frontend_id,
            traceparent=traceparent,
            prompt=prompt,
            outputs=outputs,
            script=script,
            chain=BlockChain(
                self._naming, NO_KEYS if cache_keys is None else cache_keys.keys, prompt, outputs
            ),
            length_at=limit - 1,
            reasons=(
                self._settings.reasoning_mean_tokens > 0
                and end_think is not None
                and opens_reasoning(prompt, self._vocabulary) is not False
            ),
            reasoning_end=outputs.index(end_think) if end_think in outputs else None,
            logprobs=sampling.logprobs,
            arrival_s=message.arrival_time,
            trace_headers=message.trace_headers,
        )


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
    """Return vLLM's answer to this call, or its failure for unknown methods."""
    try:
        method = wire.read_utility(frames).method
    except msgspec.DecodeError as error:
        return wire.utility_failure(call_id, f"malformed utility call: {error}")
    if method not in _ANSWERS:
        return wire.utility_failure(
            call_id, f"Call to {method} method failed: the simulated engine has no method {method!r}"
        )
    return wire.utility_result(call_id, _ANSWERS[method])
