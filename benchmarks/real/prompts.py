"""Prompts whose reasoning and answer the prompt decides, short and long."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

from tailrace.tiny.task import Task, task


def tasks(draw: random.Random, count: int, thought: tuple[int, int], answer: tuple[int, int]) -> list[Task]:
    """`count` tasks that count down from within these ranges, ends included: a line is 9 tokens."""
    return [task(_word(draw), draw.randint(*thought), draw.randint(*answer)) for _ in range(count)]


def mix(seed: int) -> list[Task]:
    """Short and long reasoning: half of 50 to 200 tokens, half of 500 to 1,000. Answers of 72 to 270."""
    draw = random.Random(seed)
    return [*tasks(draw, 12, (3, 20), (8, 30)), *tasks(draw, 12, (53, 108), (8, 30))]


def skewed(seed: int) -> list[Task]:
    """One in four long, the rest short: loads drift apart after requests were placed."""
    draw = random.Random(seed)
    return [*tasks(draw, 12, (3, 20), (5, 20)), *tasks(draw, 4, (80, 130), (5, 20))]


def answers(seed: int) -> list[Task]:
    """Little reasoning, answers of 90 to 720 tokens: a burst of them fills what decodes."""
    draw = random.Random(seed)
    return tasks(draw, 16, (3, 10), (10, 80))


def longest(chosen: Sequence[Task]) -> int:
    """A max_tokens that cuts none of them off."""
    return max(each.completion_tokens for each in chosen) + 16


def _word(draw: random.Random) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=4))
