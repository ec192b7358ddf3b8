"""The due time of a waiting prompt, by which the batch order `earliest_due` serves prompts.

A shorter prompt may overtake a longer one if it arrives within a multiple of the longer one's prefill time:
many short prompts keep their SLOs at the cost of the few long ones that would have made all of them late.
That pays only under overload, so a prompt also yields no longer than in proportion to the time it would have
taken anyway, behind the queue that it found; with short queues, prompts are served nearly in order of
arrival. There is no starvation: a prompt's due time is fixed, while those of later arrivals move on.
"""

from __future__ import annotations

from typing import Final

# A prompt yields for at most this many times its own prefill. The SLOs of Arrow's table 1 are 80 to 105 times
# the prefill of their traces' mean prompt; with a quarter of 80, the mean prompt yields a quarter of its SLO,
# and a prompt of four times that length all of it.
PREFILLS: Final = 20.0
# A prompt yields for at most this many times its own prefill and that of the queue that it found. A smaller
# value shortens the tail, but fewer prompts meet their SLOs under overload: see docs/policy-tailrace.md.
STRETCH: Final = 2.0
# Prefill seconds of a prompt per token and per token squared: `llama-3.1-8b-h100` of `tailrace/profiles`. The
# order depends only on the ratio of the two, which differs little between dense models.
_PER_TOKEN_S: Final = 1.74934e-5
_PER_TOKEN_SQUARED_S: Final = 5.20357e-10


def nominal_s(tokens: int, squares: int) -> float:
    """Return the nominal prefill seconds of prompts with `tokens` in all, and the sum of squares `squares`.

    A prompt of n tokens that is computed up to token c has n - c tokens and n * n - c * c squares left.
    """
    return _PER_TOKEN_S * tokens + _PER_TOKEN_SQUARED_S * squares


def due_s(arrived_s: float, prompt_tokens: int, queue_s: float) -> float:
    """Return the due time of a prompt, in seconds on the clock of `arrived_s`. Earlier ones are served first.

    `queue_s`: nominal prefill seconds left on the instance when the prompt arrived there.
    """
    return arrived_s + due_after_s(nominal_s(prompt_tokens, prompt_tokens * prompt_tokens), queue_s)


def due_after_s(own_s: float, queue_s: float) -> float:
    """Return the seconds from arrival to due time of a prompt whose own prefill takes `own_s`."""
    return min(PREFILLS * own_s, STRETCH * (queue_s + own_s))
