"""Describe in one line why vLLM does not accept a configuration."""

from __future__ import annotations

from pydantic import ValidationError


def one_line(error: Exception) -> str:
    """Return the error's message in one line; for pydantic's errors, each field with its value and the
    messages of its checks."""
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())
    found: dict[str, list[str]] = {}
    for each in error.errors():
        name = f"{each['loc'][0]} {each['input']!r}: " if each["loc"] else ""
        found.setdefault(name, []).append(" ".join(each["msg"].removeprefix("Value error, ").split()))
    return "; ".join(f"{name}{', or '.join(messages)}" for name, messages in found.items())
