"""Say in one line what is wrong with a YAML file."""

from __future__ import annotations

from typing import Any


def yaml_problem(error: Any) -> str:
    """Return what a yaml.YAMLError is about, and where: its own text needs several lines, with a caret."""
    if (position := getattr(error, "position", None)) is not None:
        # A ReaderError: of a binary file, or one in another encoding.
        return f"not YAML in UTF-8 (position {position})"
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    what = ", ".join(filter(None, [error.problem, error.context]))
    return f"line {mark.line + 1}, column {mark.column + 1}: {what or 'no YAML'}"
