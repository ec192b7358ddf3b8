"""How long a request is expected to go on, in output tokens."""

from __future__ import annotations

from tailrace.cluster import RequestView
from tailrace.perf.horizon import HORIZON


def remaining_tokens(request: RequestView, at_least: float) -> float:
    """As predicted; without a prediction as long again as it has gone on, and `at_least`.

    That is the median for output lengths of which nothing but the scale is unknown. No further than ARES's
    horizon: by then arrivals will have changed the balance anyway.
    """
    predicted = request.predicted_remaining_tokens
    if predicted is None:
        predicted = max(at_least, float(request.output_tokens))
    return min(predicted, float(HORIZON.length))
