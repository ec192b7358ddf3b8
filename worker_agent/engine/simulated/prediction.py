"""What a length predictor would say: the script knows how long a request will be."""

from __future__ import annotations

from typing import Final

from worker_agent.engine.simulated.request import Request

_HALF: Final = 1 << 63


def predicted_remaining(request: Request, error: float | None) -> float | None:
    """Output tokens still to come, off by up to the share `error` of them; None when nothing is predicted.

    The share is drawn from what decides the request's tokens: the same on every engine and at every moment.
    """
    if error is None:
        return None
    left = max(0, request.finish_at + 1 - len(request.outputs))
    draw = int.from_bytes(request.script.identity[16:24], "little") / _HALF - 1.0
    return max(0.0, left * (1.0 + error * draw))
