"""Describe in one line why vLLM does not accept a configuration."""

from __future__ import annotations

import re
from typing import Final

from pydantic import ValidationError

# What pydantic appends to a message for developers.
_PYDANTIC: Final = re.compile(r" \[type=[^\]]*\]| For further information visit \S+")


def without_pydantic(message: str) -> str:
    """Return a message that may quote one of pydantic's, in one line and without what that adds."""
    return _PYDANTIC.sub("", " ".join(message.split()))


def one_line(error: Exception) -> str:
    """Return the error's message in one line; for pydantic's errors, each field with its value and the
    messages of its checks."""
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())
    messages_by_field: dict[str, list[str]] = {}
    for detail in error.errors():
        name = f"{detail['loc'][0]} {detail['input']!r}: " if detail["loc"] else ""
        messages_by_field.setdefault(name, []).append(
            " ".join(detail["msg"].removeprefix("Value error, ").split())
        )
    return "; ".join(f"{name}{', or '.join(messages)}" for name, messages in messages_by_field.items())
