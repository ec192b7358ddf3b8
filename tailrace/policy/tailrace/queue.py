"""The prompts waiting on instances, by column, in the order in which `earliest_due` serves them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np

from tailrace.intra.earliest_due import LATE_S, PREFILLS, STRETCH, due_after_s, late_at_s, nominal_s
from tailrace.perf.steps import Floats, StepModel
from tailrace.policy.requests import Prompt

# Prompts of an instance that are known at most; others are taken to be served after any arrival. Bounds the
# memory: three numbers per prompt and instance.
DEEPEST: Final = 256
_FIRST_DEPTH: Final = 8


class Ahead(NamedTuple):
    """The queue of each instance as an arrival finds it: prompt tokens and seconds of prefill served before
    it, and the number of prompts served after it."""

    tokens: Floats
    seconds: Floats
    behind: Floats


class QueueColumns:
    """The queues of all instances of a cluster. A waiting prompt is a row, the first to be served first."""

    def __init__(self, instances: int) -> None:
        depth = _FIRST_DEPTH
        # Due times in seconds. Prompts that do not exist are never due.
        self._due: Floats = np.full((depth, instances), np.inf)
        # Tokens, and seconds of prefill, of the first n prompts; one longer than `due`.
        self._tokens: Floats = np.zeros((depth + 1, instances))
        self._seconds: Floats = np.zeros((depth + 1, instances))
        # Tokens of all prompts of an instance that are already computed; they belong to the first prompts.
        self._computed: Floats = np.zeros(instances)
        # Prefill left of all prompts, in nominal seconds.
        self._queued_s: Floats = np.zeros(instances)
        self._prompts = np.zeros(instances, dtype=np.intp)
        # Prompts of all instances.
        self.prompts = 0
        self._positions = np.arange(instances)

    def set(
        self,
        position: int,
        prompts: Sequence[Prompt],
        backlog_tokens: int,
        steps: StepModel,
        late_s: float = LATE_S,
        late: tuple[float, float] | None = None,
    ) -> None:
        """Set the queue of an instance with these step times. `backlog_tokens` of the prompts are not
        computed yet; a larger backlog includes prompts that are not listed. `late`: the time and the TTFT
        SLO, if late prompts wait for others until `late_s` after they arrived.

        Each prompt's due time assumes that it arrived behind the earlier prompts that are still here; those
        served since are unknown.
        """
        if not prompts:
            if count := int(self._prompts[position]):
                self._due[:, position] = np.inf
                self._prompts[position] = self._queued_s[position] = self._computed[position] = 0
                self.prompts -= count
            return
        queued_s = 0.0
        queue: list[tuple[float, int]] = []
        for arrived_s, length in sorted(prompts):
            own_s = nominal_s(length, length * length)
            due_s = arrived_s + due_after_s(own_s, queued_s)
            if late is not None and late_at_s(arrived_s, own_s, late[1]) < late[0]:
                due_s = max(due_s, arrived_s + late_s)
            queue.append((due_s, length))
            queued_s += own_s
        queue.sort()
        computed = left = max(0, sum(length for _, length in queue) - backlog_tokens)
        for _, length in queue:
            if not left:
                break
            done = min(left, length)
            left -= done
            queued_s -= nominal_s(done, done * done)
        known = queue[:DEEPEST]
        while len(known) > len(self._due):
            self._deepen()
        count, lengths = len(known), [length for _, length in known]
        self._due[:count, position] = [due for due, _ in known]
        self._due[count:, position] = np.inf
        # Few in most queues: for lists of them, NumPy's sums take several times as long, and give the same.
        self._tokens[1 : count + 1, position] = list(accumulate(lengths))
        self._seconds[1 : count + 1, position] = list(accumulate(map(steps.compute_s, lengths)))
        self._computed[position] = computed
        self._queued_s[position] = queued_s
        self.prompts += len(queue) - int(self._prompts[position])
        self._prompts[position] = len(queue)

    def _deepen(self) -> None:
        """Double the depth."""
        more = self._due.shape
        self._due = np.concatenate((self._due, np.full(more, np.inf)))
        self._tokens = np.concatenate((self._tokens, np.zeros(more)))
        self._seconds = np.concatenate((self._seconds, np.zeros(more)))

    def ahead(self, own_s: float, now: float) -> Ahead:
        """Return what is ahead of and behind a prompt that arrives now and takes `own_s` nominal seconds."""
        limit = now + np.minimum(PREFILLS * own_s, STRETCH * (self._queued_s + own_s))
        deepest = min(DEEPEST, int(self._prompts.max(initial=0)))
        rows = (self._due[:deepest] <= limit).sum(axis=0)
        tokens, seconds = self._tokens[rows, self._positions], self._seconds[rows, self._positions]
        left: Floats = np.maximum(0.0, tokens - self._computed)
        behind: Floats = (self._prompts - rows).astype(np.float64)
        return Ahead(left, seconds * left / np.maximum(1.0, tokens), behind)
