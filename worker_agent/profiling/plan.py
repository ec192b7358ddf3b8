"""The measurement plan: cheap measurements first, since the budget may end it early."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from worker_agent.engine.base import EngineInfo

# Share of the KV cache that probes use; the rest is for other contents and partly filled blocks.
_KV_SHARE: Final = 0.8
_SHORTEST: Final = 16
# Pure decode steps per batch, enough for a meaningful median.
_DECODE_STEPS: Final = 24
# CascadeInfer profiles batch sizes 1, 2, 4, ... and doubling lengths (section 4.1); here every second one.
_FACTOR: Final = 4
_LONGEST_BATCH: Final = 256


@dataclass(frozen=True, slots=True)
class Batch:
    """`requests` concurrent requests of these lengths, in `rounds` rounds."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    rounds: int = 2

    @property
    def tokens(self) -> int:
        """Return the tokens that the concurrent requests hold at their end."""
        return self.requests * (self.prompt_tokens + self.output_tokens)


def prompt_lengths(info: EngineInfo) -> list[int]:
    """Return the prompt lengths for the TTFT curve: 16, 32, ... and the longest that fits."""
    longest = min(info.max_model_len - 2, kv_room(info))
    lengths = list(_spread(_SHORTEST, longest, 2))
    if not lengths or lengths[-1] < longest:
        lengths.append(longest)
    return lengths


def batches(info: EngineInfo) -> list[Batch]:
    """Return the batches of all sizes and lengths that fit, by their total tokens."""
    planned: list[Batch] = []
    for requests in _spread(1, min(info.max_num_seqs, _LONGEST_BATCH), _FACTOR):
        for prompt in _spread(2 * _SHORTEST, info.max_model_len, _FACTOR):
            # The prompts of a batch take several steps, during which the first ones already decode.
            mixed = -(-requests * prompt // info.step_tokens)
            batch = Batch(requests, prompt, _DECODE_STEPS + 2 * mixed)
            if prompt + batch.output_tokens <= info.max_model_len and batch.tokens <= kv_room(info):
                planned.append(batch)
    return sorted(planned, key=lambda batch: batch.tokens)


def kv_room(info: EngineInfo) -> int:
    """Return the tokens of KV that probes may use."""
    return int(_KV_SHARE * info.kv_blocks_total * info.kv_shape.block_tokens)


def _spread(first: int, longest: int, factor: int) -> Iterator[int]:
    while first <= longest:
        yield first
        first *= factor
