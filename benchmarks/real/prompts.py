"""Prompts whose reasoning and answer the prompt decides, short and long."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.tiny.task import Task, task
from tailrace.tiny.tokens import encode_turns


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


@dataclass(frozen=True, slots=True)
class Later(Task):
    """A task late in a conversation: the tasks before it stand in the prompt, each with its answer."""

    before: tuple[Task, ...]


def conversations(seed: int, count: int) -> list[Task]:
    """Prompts of some 400 to 700 tokens, all different, little reasoning and short answers.

    The tiny model loses its way in conversations that are much longer than that.
    """
    draw = random.Random(seed)
    asked = tasks(draw, count, (1, 2), (1, 3))
    before = [tasks(draw, draw.randint(4, 6), (1, 99), (1, 8)) for _ in asked]
    return [Later(a.prompt, a.thought, a.answer, tuple(b)) for a, b in zip(asked, before, strict=True)]


def prompt_tokens(asked: Task) -> int:
    """Of the whole prompt: a token is a byte, and one or two more begin and end each turn."""
    return len(encode_turns([(turn["role"], turn["content"]) for turn in messages(asked)]))


def messages(asked: Task) -> list[dict[str, str]]:
    """As /v1/chat/completions takes them."""
    before = asked.before if isinstance(asked, Later) else ()
    turns = [turn for each in before for turn in (("user", each.prompt), ("assistant", each.answer))]
    return [{"role": role, "content": text} for role, text in [*turns, ("user", asked.prompt)]]


def longest(chosen: Sequence[Task]) -> int:
    """A max_tokens that cuts none of them off."""
    return max(each.completion_tokens for each in chosen) + 16


def _word(draw: random.Random) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=4))
