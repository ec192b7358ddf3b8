"""A seeded request's generator: where it stands after n tokens, and how it goes back a draw.

vLLM gives each seeded request a generator of its own, which the sampler draws from once for each token that
it samples for the request (vllm/v1/sample/ops/topk_topp_sampler.py): on CPU one 31-bit integer (before 0.32 a
row of exponentials), elsewhere a row of exponentials as wide as the vocabulary. So the seed and the number of
tokens say where it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler


class CpuDraws:
    """What a sampler on CPU draws from a request's generator."""

    def __init__(self, sampler: TopKTopPSampler, vocab_size: int) -> None:
        self._sampler = sampler
        self._logits = (1, vocab_size)

    def skip(self, generator: torch.Generator, number: int) -> None:
        """Move the generator on by so many tokens."""
        if number and _draws_integers(self._sampler):
            torch.randint(0, 2**31, (number,), generator=generator, dtype=torch.long)
            return
        for _ in range(number):
            _sample(self._sampler, torch.zeros(self._logits), generator)


class SeededCpuGenerator(torch.Generator):  # type: ignore[misc]
    """A CPU generator that can take a draw back.

    A prompt that is computed in several steps samples a token in each, and vLLM takes those draws back by
    moving the generator's offset. Generators on CPU have none and raise, which would end the engine. The
    draws to keep are as many as the request has tokens, so taking back is: start over, draw that many.
    """

    def __new__(cls, seed: int, drawn: Callable[[], int], draws: CpuDraws) -> SeededCpuGenerator:
        # torch's own constructor looks at the arguments here, and knows only a device.
        generator: SeededCpuGenerator = super().__new__(cls)
        return generator

    def __init__(self, seed: int, drawn: Callable[[], int], draws: CpuDraws) -> None:
        """`drawn`: how many of its draws count, which is how many output tokens the model runner has made."""
        super().__init__()
        self._seed = seed
        self._drawn = drawn
        self._draws = draws
        self.rewind()

    def rewind(self) -> None:
        """Go to where the generator stands after as many tokens as the request has."""
        self.manual_seed(self._seed)
        self._draws.skip(self, self._drawn())

    def get_offset(self) -> int:
        """Nothing: set_offset does not need it."""
        return 0

    def set_offset(self, offset: int) -> None:
        """vLLM calls this only to take back the last draw."""
        self.rewind()


def make_generator(
    device: torch.device,
    seed: int,
    drawn: Callable[[], int],
    sampler: TopKTopPSampler,
    vocab_size: int,
    state: bytes,
) -> torch.Generator:
    """The generator of a request that has made so many tokens: from another's state, else replayed from the
    seed. `sampler`: the model runner's, over `vocab_size` tokens."""
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
    """Advance a GPU generator as `rows` rows of exponentials would: each moves its offset equally far."""
    torch.empty(vocab_size, dtype=torch.float32, device=device).exponential_(generator=generator)
    generator.set_offset(generator.get_offset() * rows)


@cache
def _draws_integers(sampler: TopKTopPSampler) -> bool:
    """Whether a token costs one integer; looked at where the generator stands after one."""
    used, other = (torch.Generator().manual_seed(0) for _ in range(2))
    _sample(sampler, torch.zeros((1, 8)), used)
    torch.randint(0, 2**31, (1,), generator=other, dtype=torch.long)
    return bool(torch.equal(used.get_state(), other.get_state()))


def _sample(sampler: TopKTopPSampler, logits: torch.Tensor, generator: torch.Generator) -> None:
    with torch.inference_mode():
        sampler.forward_cpu(logits, {0: generator}, None, None)
