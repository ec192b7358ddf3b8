"""When a waiting prompt is due: which prompts overtake which inside an instance of `answers_first`.

A prompt may be overtaken by those that come up to some times its own prefill after it and take less.
Where there is time for all, that changes little. Where there is not, the many short prompts keep their SLOs
at the cost of the few long ones that would have made all of them late. Age settles it in the end: a prompt's
due time stands still while those of later arrivals move on, so nobody waits for ever.
"""

from __future__ import annotations

from typing import Final

# The SLOs of Arrow's table 1 are 80 to 105 times the prefill of their traces' mean prompt. A quarter of 80:
# the mean prompt yields a quarter of the time that it has, and only one of four times that length all of it.
PREFILLS: Final = 20.0
# Seconds of one prompt's prefill by its tokens and their square: `llama-3.1-8b-h100` of `tailrace/profiles`.
# An order needs no more than how lengths stand to each other, and that differs little between dense models.
_PER_TOKEN_S: Final = 1.74934e-5
_PER_TOKEN_SQUARED_S: Final = 5.20357e-10


def due_s(arrived_s: float, prompt_tokens: int, prefills: float) -> float:
    """Seconds, on the clock of `arrived_s`. The smaller is served first.

    `prefills`: how many times its own prefill it yields to others; 0: none, in order of arrival.
    """
    prefill_s = (_PER_TOKEN_S + _PER_TOKEN_SQUARED_S * prompt_tokens) * prompt_tokens
    return arrived_s + prefills * prefill_s
