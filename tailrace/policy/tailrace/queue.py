"""The prompts that wait on an instance, in the order in which `answers_first` serves them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from tailrace.intra.due import due_s
from tailrace.policy.prompts import Prompt
from tailrace.policy.tailrace.steps import StepModel


@dataclass(frozen=True, slots=True)
class Queue:
    """What an arrival finds: `due[n]` is when the n-th prompt is due, sums are over those before the n-th."""

    due: tuple[float, ...]
    # Tokens, and seconds of prefill, of the first n; one longer than `due`.
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    # Tokens of them that are computed already.
    computed: int

    @staticmethod
    def of(prompts: Iterable[Prompt], backlog_tokens: int, steps: StepModel, prefills: float) -> Queue:
        """Of these prompts so many tokens are not computed yet; where it is more, of others besides.

        `prefills`: as `due_s` has it.
        """
        dues, tokens, seconds = [], [0], [0.0]
        for due, length in sorted(
            (due_s(arrived_s, length, prefills), length) for arrived_s, length in prompts
        ):
            dues.append(due)
            tokens.append(tokens[-1] + length)
            seconds.append(seconds[-1] + steps.compute_s(length))
        return Queue(tuple(dues), tuple(tokens), tuple(seconds), max(0, tokens[-1] - backlog_tokens))

    def before(self, due: float) -> tuple[int, float, int]:
        """(tokens, seconds of prefill) before a prompt that is due then, and how many prompts after it.

        What is computed already belongs to those that are first.
        """
        place = bisect_right(self.due, due)
        tokens = self.tokens[place]
        left = max(0, tokens - self.computed)
        seconds = self.seconds[place] * left / tokens if left else 0.0
        return left, seconds, len(self.due) - place
