"""Hooks for schemathesis: answers of at most 60 tokens."""

from __future__ import annotations

from typing import Any

import schemathesis

_TOKENS = 60


def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Bound what a request asks for."""
    if isinstance(case.body, dict):
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            asked = case.body.get(name, _TOKENS)
            case.body[name] = min(asked, _TOKENS) if isinstance(asked, int) else asked


schemathesis.hook(before_call)
