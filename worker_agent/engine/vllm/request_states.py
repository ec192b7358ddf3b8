"""The model runner's state of requests that began on other engines, including their sampling state.

vLLM has two model runners. V1 keeps a `CachedRequestState` of each request across a preemption, including its
generator, and uses it when the request resumes. V2 forgets preempted requests: a resumed request is new to
it, with prompt, outputs and number of computed tokens, and the noise of a seeded request depends only on its
seed and position. So only V1 has to be told of requests, and asked for their generators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.request import Request
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

# The generator of a seeded request: its state after n tokens, and how to take back a draw.
#
# vLLM gives each seeded request its own generator, from which the sampler draws once per sampled token
# (vllm/v1/sample/ops/topk_topp_sampler.py): on CPUs one 31-bit integer (before 0.32 a row of exponentials),
# elsewhere a row of exponentials as wide as the vocabulary. So the seed and the number of tokens determine
# the generator's state.


class CpuDraws:
    """The draws of a CPU sampler from a request's generator."""

    def __init__(self, sampler: TopKTopPSampler, vocab_size: int) -> None:
        self._sampler = sampler
        self._logits = (1, vocab_size)

    def skip(self, generator: torch.Generator, number: int) -> None:
        """Advance the generator by the draws of `number` tokens."""
        if number and _draws_integers(self._sampler):
            torch.randint(0, 2**31, (number,), generator=generator, dtype=torch.long)
            return
        for _ in range(number):
            _sample(self._sampler, torch.zeros(self._logits), generator)


class SeededCpuGenerator(torch.Generator):  # type: ignore[misc]
    """A CPU generator that can take back a draw.

    A prompt computed in several steps samples a token in each, and vLLM takes back those draws by setting the
    generator's offset. CPU generators have no offset and raise, which would end the engine. As a request has
    one draw per token, this class takes back a draw by starting over and drawing once per token.
    """

    def __new__(cls, seed: int, drawn: Callable[[], int], draws: CpuDraws) -> SeededCpuGenerator:
        # Pass no arguments: torch's constructor accepts only a device.
        generator: SeededCpuGenerator = super().__new__(cls)
        return generator

    def __init__(self, seed: int, drawn: Callable[[], int], draws: CpuDraws) -> None:
        """`drawn` returns the number of valid draws: the output tokens that the model runner has
        generated."""
        super().__init__()
        self._seed = seed
        self._drawn = drawn
        self._draws = draws
        self.rewind()

    def rewind(self) -> None:
        """Set the generator to its state after the request's tokens."""
        self.manual_seed(self._seed)
        self._draws.skip(self, self._drawn())

    def get_offset(self) -> int:
        """Return 0, because set_offset ignores the offset."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Take back the last draw, the only purpose for which vLLM calls this."""
        self.rewind()


def make_generator(
    device: torch.device,
    seed: int,
    drawn: Callable[[], int],
    sampler: TopKTopPSampler,
    vocab_size: int,
    state: bytes,
) -> torch.Generator:
    """Create the generator of a request with `drawn()` tokens, from a transferred state or, if that is empty,
    by replaying the draws from the seed. `sampler` is the model runner's, over `vocab_size` tokens."""
    if device.type == "cpu":
        generator: torch.Generator = SeededCpuGenerator(seed, drawn, CpuDraws(sampler, vocab_size))
    else:
        generator = torch.Generator(device=device)
        generator.manual_seed(seed)
        rows = drawn()
        if not state and rows:
            _skip_rows(generator, device, vocab_size, rows)
    if state:
        generator.set_state(torch.from_numpy(np.frombuffer(state, dtype=np.uint8).copy()))
    return generator


def _skip_rows(generator: torch.Generator, device: torch.device, vocab_size: int, rows: int) -> None:
    """Advance a GPU generator by `rows` rows of exponentials, each of which moves its offset equally far."""
    torch.empty(vocab_size, dtype=torch.float32, device=device).exponential_(generator=generator)
    generator.set_offset(generator.get_offset() * rows)


@cache
def _draws_integers(sampler: TopKTopPSampler) -> bool:
    """Return whether the sampler draws one integer per token, by comparing generator states after one
    token."""
    used, other = (torch.Generator().manual_seed(0) for _ in range(2))
    _sample(sampler, torch.zeros((1, 8)), used)
    torch.randint(0, 2**31, (1,), generator=other, dtype=torch.long)
    return bool(torch.equal(used.get_state(), other.get_state()))


def _sample(sampler: TopKTopPSampler, logits: torch.Tensor, generator: torch.Generator) -> None:
    with torch.inference_mode():
        sampler.forward_cpu(logits, {0: generator}, None, None)


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


class RequestStates:
    """The state of requests in Model Runner V1. Call its methods only between two steps."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner

    def adopt(self, adoption: Adoption) -> None:
        """Add a request: create the cached state that vLLM creates for a new one, with its output tokens.

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
        """Remove an adopted request that never reached the scheduler, which reports the end of all others."""
        self._runner.requests.pop(request_id, None)
        self._runner.num_prompt_logprobs.pop(request_id, None)

    def rewind(self, rewind: Rewind) -> None:
        """Take back the random draws of steps that ran on corrupt KV; vLLM itself takes back their tokens."""
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
        """Return the state of a request's own generator before its next draw; empty if it has none."""
        generator = self._runner.requests[request_id].generator
        if generator is None:
            return b""
        return bytes(generator.get_state().numpy().tobytes())
