"""The prompts waiting on an instance, in the order in which `earliest_due` serves them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tailrace.intra.due import PREFILLS, STRETCH, due_after_s, nominal_s
from tailrace.perf.steps import Floats, StepModel
from tailrace.policy.phase_load import Prompt


@dataclass(frozen=True, slots=True)
class Queue:
    """Waiting prompts in order of service."""

    # Due time of the n-th prompt, in seconds.
    due: tuple[float, ...]
    # Tokens, and seconds of prefill, of the first n prompts; one longer than `due`.
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    # Tokens of all prompts that are already computed.
    computed: int
    # Prefill left of all prompts, in nominal seconds: `queue_s` of an arrival's `due_s`.
    queued_s: float

    @staticmethod
    def of(prompts: Iterable[Prompt], backlog_tokens: int, steps: StepModel) -> Queue:
        """Build the queue of `prompts`, of which `backlog_tokens` are not computed yet; a larger backlog
        includes prompts that are not listed.

        Each prompt's due time assumes that it arrived behind the earlier prompts that are still here; those
        served since are unknown.
        """
        queued_s = 0.0
        known: list[tuple[float, int]] = []
        for arrived_s, length in sorted(prompts):
            own_s = nominal_s(length, length * length)
            known.append((arrived_s + due_after_s(own_s, queued_s), length))
            queued_s += own_s
        dues, tokens, seconds = [], [0], [0.0]
        computed = left = max(0, sum(length for _, length in known) - backlog_tokens)
        for due, length in sorted(known):
            dues.append(due)
            tokens.append(tokens[-1] + length)
            seconds.append(seconds[-1] + steps.compute_s(length))
            done = min(left, length)
            left -= done
            queued_s -= nominal_s(done, done * done)
        return Queue(tuple(dues), tuple(tokens), tuple(seconds), computed, queued_s)

    def before(self, due: float) -> tuple[int, float, int]:
        """Return the tokens and seconds of prefill served before a prompt with that due time, and the number
        of prompts served after it.

        Computed tokens belong to the first prompts.
        """
        place = bisect_right(self.due, due)
        tokens = self.tokens[place]
        left = max(0, tokens - self.computed)
        seconds = self.seconds[place] * left / tokens if left else 0.0
        return left, seconds, len(self.due) - place


class SolePrompts:
    """The queues of those instances on which a single prompt waits, by column: most of a large fleet's."""

    def __init__(self, instances: int) -> None:
        self._columns: Floats = np.repeat(np.array([_NOBODY]).T, instances, axis=1)

    def set(self, position: int, queue: Queue | None) -> None:
        """Set the queue of an instance; one of several prompts, or None, counts as no prompt."""
        row = _NOBODY
        if queue is not None and len(queue.due) == 1:
            row = _SolePrompt(queue.due[0], queue.tokens[1], queue.seconds[1], queue.computed, queue.queued_s)
        self._columns[:, position] = row

    def before(self, own_s: float, now: float) -> tuple[Floats, Floats, Floats]:
        """Return `Queue.before` of every instance, for a prompt that arrives now and takes `own_s` nominal
        seconds."""
        due, tokens, seconds, computed, queued_s = self._columns
        served = due <= now + np.minimum(PREFILLS * own_s, STRETCH * (queued_s + own_s))
        left: Floats = served * np.maximum(0.0, tokens - computed)
        after: Floats = (due < np.inf) * 1.0 - served
        return left, seconds * left / tokens, after


class _SolePrompt(NamedTuple):
    """Fields of a `Queue` with one prompt."""

    due: float
    tokens: float
    seconds: float
    computed: float
    queued_s: float


# Never due. One token, because seconds are divided by tokens.
_NOBODY = _SolePrompt(np.inf, 1.0, 0.0, 0.0, 0.0)
