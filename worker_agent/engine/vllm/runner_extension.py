"""Mixed into vLLM's worker through `worker_extension_cls`: sampling state in and out of the model runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.sampling_params import SamplingType
from vllm.v1.request import Request
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from worker_agent.engine.vllm.connector import TailraceConnector
from worker_agent.engine.vllm.hidden_states import HiddenStateTap, StepStates
from worker_agent.engine.vllm.sampling import make_generator


@dataclass(frozen=True, slots=True)
class Adoption:
    """A request that the model runner must know before its first step here.

    generator_state: torch's, at the point where the next token is to be sampled; empty to make it from the
    seed and the number of output tokens.
    """

    request: Request
    generator_state: bytes


@dataclass(frozen=True, slots=True)
class Rewind:
    """A request whose last steps do not count: it has so many output tokens."""

    request_id: str
    output_tokens: int


class RunnerExtension:
    """Methods for `collective_rpc`. Names start with tailrace_, as they join vLLM's worker class."""

    model_runner: GPUModelRunner

    def tailrace_connector(self) -> TailraceConnector:
        """The worker side of the KV connector, which holds the KV tensors."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, TailraceConnector)
        return connector

    def tailrace_tap(self, take: Callable[[StepStates], None]) -> HiddenStateTap:
        """Hand the hidden states of steps to `take`."""
        return HiddenStateTap(self.model_runner, take)

    def tailrace_adopt(self, adoption: Adoption) -> None:
        """Make the cached state that vLLM makes for a new request, with the output tokens it already has.

        Its blocks are left empty: the scheduler sends them all when it resumes the request.
        """
        runner, request = self.model_runner, adoption.request
        params = request.sampling_params
        outputs = list(request.output_token_ids)
        state = CachedRequestState(
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            prompt_embeds=request.prompt_embeds,
            prompt_is_token_ids=request.prompt_is_token_ids,
            mm_features=request.mm_features,
            sampling_params=params,
            pooling_params=None,
            generator=None,
            block_ids=([],),
            num_computed_tokens=request.num_computed_tokens,
            output_token_ids=outputs,
            lora_request=request.lora_request,
        )
        if params.prompt_logprobs is not None and not outputs:
            runner.num_prompt_logprobs[request.request_id] = (
                runner.input_batch.vocab_size if params.prompt_logprobs == -1 else params.prompt_logprobs
            )
        if runner.uses_mrope:
            runner._init_mrope_positions(state)
        runner.requests[request.request_id] = state
        if params.sampling_type == SamplingType.RANDOM_SEED:
            state.generator = make_generator(
                runner.device,
                params.seed,
                # The list itself is another one each time that the request is resumed with async scheduling.
                lambda: len(runner.requests[request.request_id].output_token_ids),
                runner.input_batch.vocab_size,
                adoption.generator_state,
            )

    def tailrace_forget(self, request_ids: Sequence[str]) -> None:
        """Drop adopted requests that never reached the scheduler; it reports the others itself."""
        for request_id in request_ids:
            self.model_runner.requests.pop(request_id, None)
            self.model_runner.num_prompt_logprobs.pop(request_id, None)

    def tailrace_rewind(self, rewind: Rewind) -> None:
        """Take back what steps that made their tokens on bad KV drew. vLLM itself takes back the tokens."""
        runner, state = self.model_runner, self.model_runner.requests[rewind.request_id]
        if state.generator is None:
            return
        seed, vocab_size = state.sampling_params.seed, runner.input_batch.vocab_size
        fresh = make_generator(runner.device, seed, lambda: rewind.output_tokens, vocab_size, b"")
        state.generator.set_state(fresh.get_state())

    def tailrace_generator_state(self, request_id: str) -> bytes:
        """State of a request's own generator, before its next draw; empty when it has none."""
        generator = self.model_runner.requests[request_id].generator
        if generator is None:
            return b""
        return bytes(generator.get_state().numpy().tobytes())
