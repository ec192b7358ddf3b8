"""What a length predictor would say: the script knows how long a request will be."""

from __future__ import annotations

from typing import Final

from tailrace.predictor.limits import limited, tokens_left
from worker_agent.engine.simulated.request import Request

_HALF: Final = 1 << 63


def predicted_remaining(request: Request, error: float | None) -> float | None:
    """Output tokens still to come, off by up to the share `error` of them; None when nothing is predicted.

    The share is drawn from what decides the request's tokens: the same on every engine and at every moment.
    """
    if error is None:
        return None
    made = len(request.outputs)
    left = max(0, request.finish_at + 1 - made)
    draw = int.from_bytes(request.script.identity[16:24], "little") / _HALF - 1.0
    # The script's own limit holds the model's longest context too.
    return limited(left * (1.0 + error * draw), tokens_left(len(request.prompt), made, request.length_limit))
