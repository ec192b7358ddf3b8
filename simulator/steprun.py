"""The current run of an instance: steps of one batch whose durations grow linearly (steplog.py)."""

from __future__ import annotations

from simulator.steplog import elapsed, steps_within


class StepRun:
    """Steps since `start_s`: the first takes `first_s`, each next one `increment_s` more; no steps: idle."""

    __slots__ = ("first_s", "increment_s", "start_s", "steps")

    def __init__(
        self, start_s: float = 0.0, first_s: float = 0.0, increment_s: float = 0.0, steps: int = 0
    ) -> None:
        self.start_s = start_s
        self.first_s = first_s
        self.increment_s = increment_s
        self.steps = steps

    def ended(self, now: float) -> int:
        """Return the number of steps that have ended by `now`."""
        seconds = now - self.start_s
        if not self.steps or seconds < self.first_s:
            return 0
        return steps_within(self.first_s, self.increment_s, seconds, self.steps)

    def elapsed_s(self, steps: int) -> float:
        """Return the seconds from the start to the end of step number `steps`."""
        return elapsed(self.first_s, self.increment_s, steps)

    def end_s(self) -> float:
        """Return the end of the last step."""
        return self.start_s + self.elapsed_s(self.steps)

    def last_step_s(self) -> float:
        """Return the duration of the last step."""
        return self.first_s + self.increment_s * (self.steps - 1)

    def cut(self, now: float) -> bool:
        """End the run with the step in flight; a step that ends now has ended. Return whether the run became
        shorter."""
        steps = self.ended(now)
        if not steps or self.start_s + self.elapsed_s(steps) < now:
            steps += 1
        if steps >= self.steps:
            return False
        self.steps = steps
        return True
