"""Prompts that determine the lengths of reasoning and answer, short and long."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.tiny.tokens import encode_turns
from tailrace.tiny.task import Task, task


def tasks(rng: random.Random, count: int, thought: tuple[int, int], answer: tuple[int, int]) -> list[Task]:
    """Return `count` tasks that count down from numbers in these ranges, inclusive: a line is 9 tokens."""
    return [task(_word(rng), rng.randint(*thought), rng.randint(*answer)) for _ in range(count)]


def mix(seed: int) -> list[Task]:
    """Return tasks with short and long reasoning: half of 50 to 200 tokens, half of 500 to 1,000. Answers
    have 72 to
    270."""
    rng = random.Random(seed)
    return [*tasks(rng, 12, (3, 20), (8, 30)), *tasks(rng, 12, (53, 108), (8, 30))]


def skewed(seed: int) -> list[Task]:
    """Return tasks of which a quarter is long, so that loads diverge after placement."""
    rng = random.Random(seed)
    return [*tasks(rng, 12, (3, 20), (5, 20)), *tasks(rng, 4, (80, 130), (5, 20))]


def answers(seed: int) -> list[Task]:
    """Return tasks with little reasoning and answers of 90 to 720 tokens: a burst of them fills the decode
    instances."""
    rng = random.Random(seed)
    return tasks(rng, 16, (3, 10), (10, 80))


@dataclass(frozen=True, slots=True)
class FollowUp(Task):
    """A task late in a conversation: the prompt contains the previous tasks with their answers."""

    before: tuple[Task, ...]


def conversations(seed: int, count: int) -> list[Task]:
    """Return different prompts of about 400 to 700 tokens, with little reasoning and short answers.

    The tiny model fails on much longer conversations.
    """
    rng = random.Random(seed)
    last = tasks(rng, count, (1, 2), (1, 3))
    before = [tasks(rng, rng.randint(4, 6), (1, 99), (1, 8)) for _ in last]
    return [FollowUp(a.prompt, a.thought, a.answer, tuple(b)) for a, b in zip(last, before, strict=True)]


def prompt_tokens(question: Task) -> int:
    """Return the tokens of the whole prompt: one per byte, and one or two more at both ends of each turn."""
    return len(encode_turns([(turn["role"], turn["content"]) for turn in messages(question)]))


def messages(question: Task) -> list[dict[str, str]]:
    """Return the messages for /v1/chat/completions."""
    before = question.before if isinstance(question, FollowUp) else ()
    turns = [turn for each in before for turn in (("user", each.prompt), ("assistant", each.answer))]
    return [{"role": role, "content": text} for role, text in [*turns, ("user", question.prompt)]]


def max_completion_tokens(chosen: Sequence[Task]) -> int:
    """Return a max_tokens that truncates none of the answers."""
    return max(each.completion_tokens for each in chosen) + 16


def _word(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=4))
