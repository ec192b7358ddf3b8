"""What to measure on an engine, the cheap before the dear: a budget decides how much of it is done."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from worker_agent.engine.base import EngineInfo

# Of the KV cache: what else it holds, and blocks that are not full.
_KV_SHARE: Final = 0.8
_SHORTEST: Final = 16
# Steps of a batch that do nothing but decode; a median of fewer says little.
_DECODE_STEPS: Final = 24
# CascadeInfer profiles batch sizes 1, 2, 4, ... and lengths that double (section 4.1); every second one here.
_FACTOR: Final = 4
_LONGEST_BATCH: Final = 256


@dataclass(frozen=True, slots=True)
class Batch:
    """So many requests in flight, each of these lengths, each followed by `rounds` - 1 more."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    rounds: int = 2

    @property
    def tokens(self) -> int:
        """What they hold when they end."""
        return self.requests * (self.prompt_tokens + self.output_tokens)


def prompt_lengths(info: EngineInfo) -> list[int]:
    """Of the TTFT curve: 16, 32, ... and the longest that there is room for."""
    most = min(info.max_model_len - 2, _room(info))
    lengths = list(_spread(_SHORTEST, most, 2))
    if not lengths or lengths[-1] < most:
        lengths.append(most)
    return lengths


def batches(info: EngineInfo) -> list[Batch]:
    """Batch sizes by lengths, by how many tokens they take."""
    found: list[Batch] = []
    for requests in _spread(1, min(info.max_num_seqs, _LONGEST_BATCH), _FACTOR):
        for prompt in _spread(2 * _SHORTEST, info.max_model_len, _FACTOR):
            # Prompts of a batch take several steps, in which the first of them decode already.
            mixed = -(-requests * prompt // info.step_tokens)
            batch = Batch(requests, prompt, _DECODE_STEPS + 2 * mixed)
            if prompt + batch.output_tokens <= info.max_model_len and batch.tokens <= _room(info):
                found.append(batch)
    return sorted(found, key=lambda batch: batch.tokens)


def _room(info: EngineInfo) -> int:
    return int(_KV_SHARE * info.kv_blocks_total * info.kv_shape.block_tokens)


def _spread(first: int, most: int, factor: int) -> Iterator[int]:
    while first <= most:
        yield first
        first *= factor
