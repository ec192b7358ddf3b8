"""What the tiny model is asked to do, and what it must say, token for token.

The task is built to make a serving system's mistakes visible. The prompt alone decides how long the model
thinks and how long it answers, every line depends on the one before it and on the prompt, and the whole
text is known in advance, so one lost, repeated or swapped token is found by comparing strings.

    Count down from 12 with wxyz, then from 3.

makes the model think ``plan 012 wxyz 003`` and then ``012 wxyz`` ... ``001 wxyz``, one a line, and answer
``003:zyxw``, ``002:zyxw``, ``001:zyxw``.

This module is pure: it imports nothing of the model, of vLLM or of torch.
"""

import random
import string
from dataclasses import dataclass
from typing import Final

MAX_COUNT: Final = 299
"""The largest number to count down from that the model was trained on: a thought of 2,708 tokens."""

MAX_SCORED_COUNT: Final = 220
MAX_SCORED_LINES: Final = 55
"""The largest numbers that ``make_task`` draws: for the thought, and for the answer."""

HELP_THOUGHT: Final = "no count here"
HELP_ANSWER: Final = "I can only count. Try: Count down from 12 with wxyz, then from 3."
"""What the model thinks and says when it is asked for anything else."""


@dataclass(frozen=True, slots=True)
class Task:
    """One question, and the only right thought and answer."""

    prompt: str
    thought: str
    answer: str

    @property
    def thought_tokens(self) -> int:
        """Return the number of tokens strictly between ``<think>`` and ``</think>``; a byte is a token."""
        return len(self.thought.encode())

    @property
    def answer_tokens(self) -> int:
        """Return the number of tokens after ``</think>``, without the end-of-turn token."""
        return len(self.answer.encode())

    @property
    def completion_tokens(self) -> int:
        """Return the number of tokens that the model generates, both tags and the end-of-turn token
        included."""
        return self.thought_tokens + self.answer_tokens + 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which parts of a completion are exactly right."""

    thought: bool
    answer: bool

    @property
    def right(self) -> bool:
        """Return whether every token of the completion is the expected one."""
        return self.thought and self.answer


def task(word: str, n: int, m: int) -> Task:
    """Return the task to count down from ``n`` with ``word`` while thinking, and from ``m`` while answering.

    Raise ValueError for a word that is not four lower-case ASCII letters, or a number out of range.
    """
    if len(word) != 4 or not all(letter in string.ascii_lowercase for letter in word):
        raise ValueError(f"word must be four lower-case ASCII letters, not {word!r}")
    if not 1 <= n <= MAX_COUNT:
        raise ValueError(f"n must be between 1 and {MAX_COUNT}, not {n}")
    if not 1 <= m <= MAX_COUNT:
        raise ValueError(f"m must be between 1 and {MAX_COUNT}, not {m}")
    thought = [f"plan {n:03d} {word} {m:03d}", *(f"{k:03d} {word}" for k in range(n, 0, -1))]
    answer = [f"{k:03d}:{word[::-1]}" for k in range(m, 0, -1)]
    return Task(f"Count down from {n} with {word}, then from {m}.", "\n".join(thought), "\n".join(answer))


def make_task(seed: int) -> Task:
    """Draw a task determined by ``seed`` alone.

    Thoughts are spread evenly over the orders of magnitude (26 to 1,997 tokens), like those of real reasoning
    requests, rather than evenly over lengths; so are answers (8 to 494 tokens).
    """
    draw = random.Random(seed)
    word = "".join(draw.choices(string.ascii_lowercase, k=4))
    return task(word, _log_uniform(draw, MAX_SCORED_COUNT), _log_uniform(draw, MAX_SCORED_LINES))


def check(expected: Task, thought: str | None, answer: str | None) -> Verdict:
    """Compare what a server returned with what the model must say.

    Servers differ in the white space that they keep around the tags, so outer white space is not compared.
    """
    return Verdict((thought or "").strip() == expected.thought, (answer or "").strip() == expected.answer)


def _log_uniform(draw: random.Random, high: int) -> int:
    """Draw an integer in ``1..high`` whose logarithm is approximately uniform."""
    return min(high, int((high + 1) ** draw.random()))
