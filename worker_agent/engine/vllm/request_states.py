"""What the model runner must know of a request that did not begin here: sampling state in and out of it.

vLLM has two model runners. V1 keeps a `CachedRequestState` of each request across a preemption, generator
included, and knows a request that comes back by it. V2 forgets a preempted request: what comes back is new to
it, with prompt, outputs and the number of computed tokens, and the noise of a seeded request depends on its
seed and its position alone.
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

    generator_state: torch's, at the point where the next token is to be sampled; empty to make it from the
    seed and the number of output tokens.
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
        """The request as it is now; what the model runner needs of it, which may be in another process."""
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
    """A request whose last steps do not count: it has so many output tokens."""

    request_id: str
    output_tokens: int


class RequestStates(Protocol):
    """A model runner's memory of requests. Between two steps."""

    def adopt(self, adoption: Adoption) -> None:
        """Make a request known."""

    def forget(self, request_id: str) -> None:
        """Drop an adopted request that never reached the scheduler; it reports the others itself."""

    def rewind(self, rewind: Rewind) -> None:
        """Take back what steps that made their tokens on bad KV drew. vLLM itself takes back the tokens."""

    def generator_state(self, request_id: str) -> bytes:
        """State of a request's own generator, before its next draw; empty when it has none."""


class CachedStates:
    """RequestStates of Model Runner V1."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner

    def adopt(self, adoption: Adoption) -> None:
        """Make the cached state that vLLM makes for a new request, with the output tokens it already has.

        Its blocks are left empty: the scheduler sends them all when it resumes the request.
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
                # The list itself is another one each time that the request is resumed with async scheduling.
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
    """RequestStates of Model Runner V2, which needs none: the message about a new request has all."""

    def adopt(self, adoption: Adoption) -> None:
        """Nothing. A generator's state, which comes by replay from an engine with V1, has no use here."""

    def forget(self, request_id: str) -> None:
        """Nothing."""

    def rewind(self, rewind: Rewind) -> None:
        """Nothing: noise depends on the position."""

    def generator_state(self, request_id: str) -> bytes:
        """Empty."""
        return b""
