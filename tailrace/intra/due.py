"""When a waiting prompt is due: which prompts overtake which inside an instance of `earliest_due`.

A prompt may be overtaken by those that come up to some times its own prefill after it and take less: the many
short ones keep their SLOs at the cost of the few long ones that would have made all of them late. That is
worth its while only where not all can be in time, so a prompt yields no longer than in proportion to what it
would have taken anyway, behind the queue that it found: where little waits, prompts are served nearly as they
came. Age settles it in the end: a prompt's due time stands still while those of later arrivals move on, so
nobody waits for ever.
"""

from __future__ import annotations

from typing import Final

# The SLOs of Arrow's table 1 are 80 to 105 times the prefill of their traces' mean prompt. A quarter of 80:
# the mean prompt yields a quarter of the time that it has, and only one of four times that length all of it.
PREFILLS: Final = 20.0
# Times its own prefill and that of the queue that it found. With less the tail is shorter, and where not all
# can be in time fewer are: the table in docs/policy-tailrace.md.
STRETCH: Final = 2.0
# Seconds of one prompt's prefill by its tokens and their square: `llama-3.1-8b-h100` of `tailrace/profiles`.
# An order needs no more than how lengths stand to each other, and that differs little between dense models.
_PER_TOKEN_S: Final = 1.74934e-5
_PER_TOKEN_SQUARED_S: Final = 5.20357e-10


def nominal_s(tokens: int, squares: int) -> float:
    """Seconds of prefill of prompts with so many tokens in all, and so much for the sum of their squares.

    Of a prompt that is computed up to token c, n - c and n * n - c * c are left.
    """
    return _PER_TOKEN_S * tokens + _PER_TOKEN_SQUARED_S * squares


def due_s(arrived_s: float, prompt_tokens: int, queue_s: float) -> float:
    """Seconds, on the clock of `arrived_s`. The smaller is served first.

    `queue_s`: what was left to compute on the instance when the prompt came there, as `nominal_s` has it.
    """
    return arrived_s + yielded_s(nominal_s(prompt_tokens, prompt_tokens * prompt_tokens), queue_s)


def yielded_s(own_s: float, queue_s: float) -> float:
    """By how much a prompt that takes `own_s` is due after it arrived."""
    return min(PREFILLS * own_s, STRETCH * (queue_s + own_s))
