"""The model runner's state of requests that began on other engines, including their sampling state.

vLLM has two model runners. V1 keeps a `CachedRequestState` of each request across a preemption, including its
generator, and uses it when the request resumes. V2 forgets preempted requests: a resumed request is new to
it, with prompt, outputs and number of computed tokens, and the noise of a seeded request depends only on its
seed and position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.request import Request
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from worker_agent.engine.vllm.sampling import make_generator


@dataclass(frozen=True, slots=True)
class Adoption:
    """A request that the model runner must know before its first step here.

    `generator_state` is torch's state before the next token is sampled; empty: derive it from the seed and
    the number of output tokens.
    """

    request_id: str
    prompt_token_ids: list[int] | None
    prompt_embeds: torch.Tensor | None
    prompt_is_token_ids: list[bool] | None
    mm_features: list[MultiModalFeatureSpec]
    sampling_params: SamplingParams
    lora_request: LoRARequest | None
    num_computed_tokens: int
    output_token_ids: list[int]
    generator_state: bytes

    @classmethod
    def of(cls, request: Request, generator_state: bytes) -> Adoption:
        """Return what the model runner, which may be in another process, needs of the request as it is
        now."""
        return cls(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            prompt_embeds=request.prompt_embeds,
            prompt_is_token_ids=request.prompt_is_token_ids,
            mm_features=request.mm_features,
            sampling_params=request.sampling_params,
            lora_request=request.lora_request,
            num_computed_tokens=request.num_computed_tokens,
            output_token_ids=list(request.output_token_ids),
            generator_state=generator_state,
        )


@dataclass(frozen=True, slots=True)
class Rewind:
    """A request whose last steps were discarded, and how many output tokens it has left."""

    request_id: str
    output_tokens: int


class RequestStates(Protocol):
    """A model runner's state of requests. Call its methods only between two steps."""

    def adopt(self, adoption: Adoption) -> None:
        """Add a request."""

    def forget(self, request_id: str) -> None:
        """Remove an adopted request that never reached the scheduler, which reports the end of all others."""

    def rewind(self, rewind: Rewind) -> None:
        """Take back the random draws of steps that ran on corrupt KV; vLLM itself takes back their tokens."""

    def generator_state(self, request_id: str) -> bytes:
        """Return the state of a request's own generator before its next draw; empty if it has none."""


class CachedStates:
    """RequestStates of Model Runner V1."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner

    def adopt(self, adoption: Adoption) -> None:
        """Create the cached state that vLLM creates for a new request, with the output tokens it already has.

        The block IDs are left empty: the scheduler sends all of them when it resumes the request.
        """
        runner, params, outputs = self._runner, adoption.sampling_params, list(adoption.output_token_ids)
        state = CachedRequestState(
            req_id=adoption.request_id,
            prompt_token_ids=adoption.prompt_token_ids,
            prompt_embeds=adoption.prompt_embeds,
            prompt_is_token_ids=adoption.prompt_is_token_ids,
            mm_features=adoption.mm_features,
            sampling_params=params,
            pooling_params=None,
            generator=None,
            block_ids=tuple([] for _ in runner.kv_cache_config.kv_cache_groups),
            num_computed_tokens=adoption.num_computed_tokens,
            output_token_ids=outputs,
            lora_request=adoption.lora_request,
        )
        if params.prompt_logprobs is not None and not outputs:
            runner.num_prompt_logprobs[adoption.request_id] = (
                runner.input_batch.vocab_size if params.prompt_logprobs == -1 else params.prompt_logprobs
            )
        if runner.uses_mrope:
            runner._init_mrope_positions(state)
        runner.requests[adoption.request_id] = state
        if params.sampling_type == SamplingType.RANDOM_SEED:
            state.generator = make_generator(
                runner.device,
                params.seed,
                # Look the list up each time: async scheduling replaces it when the request is resumed.
                lambda: len(runner.requests[adoption.request_id].output_token_ids),
                runner.sampler.topk_topp_sampler,
                runner.input_batch.vocab_size,
                adoption.generator_state,
            )

    def forget(self, request_id: str) -> None:
        """RequestStates.forget."""
        self._runner.requests.pop(request_id, None)
        self._runner.num_prompt_logprobs.pop(request_id, None)

    def rewind(self, rewind: Rewind) -> None:
        """RequestStates.rewind."""
        runner, state = self._runner, self._runner.requests.get(rewind.request_id)
        if state is None or state.generator is None:
            return
        fresh = make_generator(
            runner.device,
            state.sampling_params.seed,
            lambda: rewind.output_tokens,
            runner.sampler.topk_topp_sampler,
            runner.input_batch.vocab_size,
            b"",
        )
        state.generator.set_state(fresh.get_state())

    def generator_state(self, request_id: str) -> bytes:
        """RequestStates.generator_state."""
        generator = self._runner.requests[request_id].generator
        if generator is None:
            return b""
        return bytes(generator.get_state().numpy().tobytes())


class NoStates:
    """RequestStates of Model Runner V2, which needs none: the scheduler's message contains everything."""

    def adopt(self, adoption: Adoption) -> None:
        """Do nothing. A generator's state, from a replay of a request of an engine with V1, is not needed."""

    def forget(self, request_id: str) -> None:
        """Do nothing."""

    def rewind(self, rewind: Rewind) -> None:
        """Do nothing: the noise depends only on the position."""

    def generator_state(self, request_id: str) -> bytes:
        """Return an empty state."""
        return b""
