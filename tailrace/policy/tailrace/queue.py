"""The prompts waiting on an instance, in the order in which `earliest_due` serves them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tailrace.intra.earliest_due import PREFILLS, STRETCH, due_after_s, nominal_s
from tailrace.perf.steps import Floats, StepModel
from tailrace.policy.requests import Prompt


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
        computed = remaining = max(0, sum(length for _, length in known) - backlog_tokens)
        for due, length in sorted(known):
            dues.append(due)
            tokens.append(tokens[-1] + length)
            seconds.append(seconds[-1] + steps.compute_s(length))
            done = min(remaining, length)
            remaining -= done
            queued_s -= nominal_s(done, done * done)
        return Queue(tuple(dues), tuple(tokens), tuple(seconds), computed, queued_s)

    def before(self, due: float) -> tuple[int, float, int]:
        """Return the tokens and seconds of prefill served before a prompt with that due time, and the number
        of prompts served after it.

        Computed tokens belong to the first prompts.
        """
        position = bisect_right(self.due, due)
        tokens = self.tokens[position]
        remaining = max(0, tokens - self.computed)
        seconds = self.seconds[position] * remaining / tokens if remaining else 0.0
        return remaining, seconds, len(self.due) - position


class QueueColumns:
    """The queues of all instances of a cluster by column. Those of more than `depth` prompts do not fit."""

    # Bounds the memory: three numbers per prompt and instance.
    DEEPEST: Final = 256

    def __init__(self, instances: int, depth: int = 8) -> None:
        # As in `Queue`, by prompt and instance. Prompts that do not exist are never due.
        self._due: Floats = np.full((depth, instances), np.inf)
        self._tokens: Floats = np.zeros((depth + 1, instances))
        self._seconds: Floats = np.zeros((depth + 1, instances))
        self._computed: Floats = np.zeros(instances)
        self._queued_s: Floats = np.zeros(instances)
        self._prompts: NDArray[np.intp] = np.zeros(instances, dtype=np.intp)
        self._positions: NDArray[np.intp] = np.arange(instances)

    @property
    def depth(self) -> int:
        """Return the length of the longest queue that fits."""
        return len(self._due)

    def deepen(self) -> bool:
        """Double the depth, and return True; False if it is the largest. Queues that did not fit are still
        missing."""
        depth, instances = self._due.shape
        if depth >= self.DEEPEST:
            return False
        self._due = np.concatenate((self._due, np.full((depth, instances), np.inf)))
        self._tokens = np.concatenate((self._tokens, np.zeros((depth, instances))))
        self._seconds = np.concatenate((self._seconds, np.zeros((depth, instances))))
        return True

    def set(self, position: int, queue: Queue | None) -> bool:
        """Set the queue of an instance; return whether it fits. None, or one that does not: no prompts."""
        fits = queue is not None and len(queue.due) <= self.depth
        self._due[:, position] = np.inf
        self._prompts[position] = 0
        if queue is not None and fits:
            prompts = len(queue.due)
            self._due[:prompts, position] = queue.due
            self._tokens[: prompts + 1, position] = queue.tokens
            self._seconds[: prompts + 1, position] = queue.seconds
            self._computed[position] = queue.computed
            self._queued_s[position] = queue.queued_s
            self._prompts[position] = prompts
        return queue is None or fits

    def before(self, own_s: float, now: float) -> tuple[Floats, Floats, Floats]:
        """Return `Queue.before` of every instance, for a prompt that arrives now and takes `own_s` nominal
        seconds."""
        limit = now + np.minimum(PREFILLS * own_s, STRETCH * (self._queued_s + own_s))
        deepest = self._prompts.max(initial=0)
        positions = (self._due[:deepest] <= limit).sum(axis=0)
        tokens = self._tokens[positions, self._positions]
        remaining: Floats = np.maximum(0.0, tokens - self._computed)
        seconds: Floats = self._seconds[positions, self._positions] * remaining / np.maximum(1.0, tokens)
        after: Floats = (self._prompts - positions).astype(np.float64)
        return remaining, seconds, after
