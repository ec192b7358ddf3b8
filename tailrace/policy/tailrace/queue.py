"""The prompts that wait on an instance, in the order in which `earliest_due` serves them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from tailrace.intra.due import nominal_s, yielded_s
from tailrace.perf.steps import StepModel
from tailrace.policy.phase_load import Prompt


@dataclass(frozen=True, slots=True)
class Queue:
    """What an arrival finds: `due[n]` is when the n-th prompt is due, sums are over those before the n-th."""

    due: tuple[float, ...]
    # Tokens, and seconds of prefill, of the first n; one longer than `due`.
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    # Tokens of them that are computed already.
    computed: int
    # What an arrival finds, as `due_s` counts it.
    found_s: float

    @staticmethod
    def of(prompts: Iterable[Prompt], backlog_tokens: int, steps: StepModel) -> Queue:
        """Of these prompts so many tokens are not computed yet; where it is more, of others besides.

        What each found when it came is what came before it and is still there: what has been served since
        is not known.
        """
        found_s = 0.0
        known: list[tuple[float, int]] = []
        for arrived_s, length in sorted(prompts):
            own_s = nominal_s(length, length * length)
            known.append((arrived_s + yielded_s(own_s, found_s), length))
            found_s += own_s
        dues, tokens, seconds = [], [0], [0.0]
        computed = left = max(0, sum(length for _, length in known) - backlog_tokens)
        for due, length in sorted(known):
            dues.append(due)
            tokens.append(tokens[-1] + length)
            seconds.append(seconds[-1] + steps.compute_s(length))
            done = min(left, length)
            left -= done
            found_s -= nominal_s(done, done * done)
        return Queue(tuple(dues), tuple(tokens), tuple(seconds), computed, found_s)

    def before(self, due: float) -> tuple[int, float, int]:
        """(tokens, seconds of prefill) before a prompt that is due then, and how many prompts after it.

        What is computed already belongs to those that are first.
        """
        place = bisect_right(self.due, due)
        tokens = self.tokens[place]
        left = max(0, tokens - self.computed)
        seconds = self.seconds[place] * left / tokens if left else 0.0
        return left, seconds, len(self.due) - place
