"""The generator of a seeded request: its state after n tokens, and how to take back a draw.

vLLM gives each seeded request its own generator, from which the sampler draws once per sampled token
(vllm/v1/sample/ops/topk_topp_sampler.py): on CPUs one 31-bit integer (before 0.32 a row of exponentials),
elsewhere a row of exponentials as wide as the vocabulary. So the seed and the number of tokens determine the
generator's state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler


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
