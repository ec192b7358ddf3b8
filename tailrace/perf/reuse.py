"""KV that is not computed but fetched: what that takes, and how much is left of what it saves.

Fetched is from host memory, or from another instance. In tokens, what is left is the shorter prefix that
would save as much if it were on the device already: the one currency of all who compare instances by it.
"""

from __future__ import annotations

from math import sqrt

from tailrace.perf.steps import StepModel


def load_s(steps: StepModel, tokens: int) -> float:
    """Seconds to copy the KV of so many tokens of one request from host memory to the device; 0: 0."""
    return steps.load_base_s + steps.load_per_token_s * tokens if tokens > 0 else 0.0


def equivalent_tokens(steps: StepModel, tokens: int, fetch_s: float) -> int:
    """Tokens on the device that save as much prefill as `tokens` do, less the seconds to fetch them."""
    left_s = max(0.0, steps.compute_s(tokens) - fetch_s)
    linear, square = steps.per_token_s, steps.per_token_squared_s
    if square > 0.0:
        return min(tokens, int((sqrt(linear * linear + 4.0 * square * left_s) - linear) / (2.0 * square)))
    return min(tokens, int(left_s / linear)) if linear > 0.0 else tokens


def held_tokens(steps: StepModel, device: int, total: int) -> int:
    """Tokens that count as held by an instance: `device` on its device, `total` there or in host memory.

    What is in host memory is loaded if that takes less than computing it, and counts less what it takes.
    """
    if total <= device:
        return device
    return max(device, equivalent_tokens(steps, total, load_s(steps, total - device)))
