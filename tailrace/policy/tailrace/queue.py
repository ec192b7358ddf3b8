"""The prompts waiting on an instance, in the order in which `earliest_due` serves them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from tailrace.intra.due import due_after_s, nominal_s
from tailrace.perf.steps import StepModel
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
