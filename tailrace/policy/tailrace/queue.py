"""The prompts that wait on an instance, in the order in which `answers_first` serves them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from tailrace.cluster import InstanceView, Phase
from tailrace.intra.due import due_s
from tailrace.policy.tailrace.steps import StepModel


@dataclass(frozen=True, slots=True)
class Queue:
    """What an arrival finds: `due[n]` is when the n-th prompt is due, sums are over those before the n-th."""

    due: tuple[float, ...]
    # Tokens, and seconds of prefill, of the first n; one longer than `due`.
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    # Tokens of them that are computed already, and of prompts that no request is known of.
    computed: int
    unknown: int
    unknown_s: float

    @staticmethod
    def of(instance: InstanceView, steps: StepModel) -> Queue:
        """Reads the instance's requests, unless nothing waits."""
        backlog = instance.prefill_backlog_tokens
        if not backlog:
            return _EMPTY
        waiting = _waiting(instance)
        dues, tokens, seconds = [], [0], [0.0]
        for due, length in waiting:
            dues.append(due)
            tokens.append(tokens[-1] + length)
            seconds.append(seconds[-1] + steps.compute_s(length))
        unknown = max(0, backlog - tokens[-1])
        return Queue(
            tuple(dues),
            tuple(tokens),
            tuple(seconds),
            max(0, tokens[-1] - backlog),
            unknown,
            steps.backlog_s(unknown, max(1, instance.waiting - len(dues))),
        )

    def before(self, due: float) -> tuple[float, float, int]:
        """(tokens, seconds of prefill) before a prompt that is due then, and how many prompts after it.

        What is computed already belongs to those that are first; prompts of which nothing but the sum is
        known come before everybody.
        """
        place = bisect_right(self.due, due)
        tokens = self.tokens[place]
        left = max(0, tokens - self.computed)
        seconds = self.seconds[place] * left / tokens if left else 0.0
        return left + self.unknown, seconds + self.unknown_s, len(self.due) - place


_EMPTY = Queue((), (0,), (0.0,), 0, 0, 0.0)


def _waiting(instance: InstanceView) -> Iterable[tuple[float, int]]:
    """(when it is due, prompt tokens) of each prompt, in that order."""
    prefill = Phase.PREFILL
    return sorted(
        (due_s(request.arrival_s, request.prompt_tokens), request.prompt_tokens)
        for request in instance.requests
        if request.phase is prefill
    )
