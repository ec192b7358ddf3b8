"""What bounds a length: a request ends at its `max_tokens`, or when its context reaches `max_model_len`.

A predictor is trained on how long answers would be (`samples`). What may still come of one that is being
served is the smaller of the two. Lengths in tokens; a limit of 0 is not known.
"""

from __future__ import annotations

import math


def tokens_left(prompt_tokens: int, output_tokens: int, max_tokens: int, max_model_len: int = 0) -> float:
    """The most output tokens that may still come, at least 0; infinite if no limit is known."""
    left = math.inf if max_tokens <= 0 else float(max_tokens - output_tokens)
    if max_model_len > 0:
        left = min(left, float(max_model_len - prompt_tokens - output_tokens))
    return max(0.0, left)


def limited(predicted: float | None, left: float) -> float | None:
    """A prediction that says no more than may still come. None: there is no prediction."""
    return None if predicted is None else max(0.0, min(predicted, left))
