"""The net benefit of KV that is fetched from host memory or from another instance instead of computed.

It is expressed in tokens: the length of the shorter prefix that would save as much time if it were on the
device already. Policies compare instances by that.
"""

from __future__ import annotations

from math import sqrt

from tailrace.perf.steps import StepModel


def load_s(steps: StepModel, tokens: int) -> float:
    """Return the seconds to copy the KV of `tokens` of one request from host memory to the device."""
    return steps.load_base_s + steps.load_per_token_s * tokens if tokens > 0 else 0.0


def equivalent_tokens(steps: StepModel, tokens: int, fetch_s: float) -> int:
    """Return how many tokens on the device save as much time as `tokens` that take `fetch_s` to fetch."""
    left_s = max(0.0, steps.compute_s(tokens) - fetch_s)
    linear, square = steps.per_token_s, steps.per_token_squared_s
    if square > 0.0:
        return min(tokens, int((sqrt(linear * linear + 4.0 * square * left_s) - linear) / (2.0 * square)))
    return min(tokens, int(left_s / linear)) if linear > 0.0 else tokens


def held_tokens(steps: StepModel, device: int, total: int) -> int:
    """Return an instance's cached tokens as equivalent tokens on its device.

    `device`: tokens on its device; `total`: tokens there or in host memory. The latter are loaded if that
    takes less time than computing them, and count less the loading time.
    """
    if total <= device:
        return device
    return max(device, equivalent_tokens(steps, total, load_s(steps, total - device)))
