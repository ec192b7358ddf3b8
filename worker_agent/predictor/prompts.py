"""The prompts from which samples are collected."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tailrace.tiny.task import make_task


class PromptsError(ValueError):
    """A file of prompts is invalid; the message names file, line and field."""


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str


class _Line(msgspec.Struct, frozen=True):
    prompt: str | None = None
    messages: list[Message] | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text that the model continues, or a conversation for its chat template."""

    content: str | tuple[Message, ...]


def read_prompts(path: Path, limit: int, seed: int) -> list[Prompt]:
    """Read JSON lines, each with `prompt` or `messages` as in the OpenAI API; draw `limit` of them.

    Raise PromptsError.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsError(f"{path}: cannot be read: {error}") from error
    prompts = [_prompt(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    return random.Random(seed).sample(prompts, min(limit, len(prompts)))


def tiny_prompts(limit: int, seed: int) -> list[Prompt]:
    """Return tasks of the tiny model."""
    draw = random.Random(seed)
    return [Prompt((Message("user", make_task(draw.getrandbits(48)).prompt),)) for _ in range(limit)]


def _prompt(place: str, line: str) -> Prompt:
    try:
        read = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise PromptsError(f"{place}: {error}") from error
    if (read.prompt is None) == (read.messages is None):
        raise PromptsError(f"{place}: prompt, messages: one of the two expected")
    if read.messages is None:
        assert read.prompt is not None
        return Prompt(read.prompt)
    if not read.messages:
        raise PromptsError(f"{place}: messages: at least one expected")
    return Prompt(tuple(read.messages))
