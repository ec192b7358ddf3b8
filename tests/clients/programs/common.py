"""Run the cases of a client library concurrently and print the outcome as JSON.

These programs run in the environment of one client each, so they import nothing of the project.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

Cases: TypeAlias = Mapping[str, Callable[[], object]]
"""Cases by name. Each returns what is compared, as JSON has it."""

_AT_A_TIME = 6
# Of a tool's arguments, and of an answer: long enough to be moved while they are generated.
SCHEMA = {
    "type": "object",
    "properties": {
        "turns": {
            "type": "array",
            "items": {"enum": ["left", "right"]},
            "minItems": 20,
            "maxItems": 20,
        }
    },
    "required": ["turns"],
    "additionalProperties": False,
}
# The tiny model may put white space without end where the grammar allows it.
MAX_TOKENS = 400
FORCED_TOOL: Mapping[str, Any] = {
    "max_tokens": MAX_TOKENS,
    "tools": [
        {"type": "function", "function": {"name": "turn", "description": "Turn.", "parameters": SCHEMA}}
    ],
    "tool_choice": {"type": "function", "function": {"name": "turn"}},
}
"""Options of an OpenAI chat that make the model call a tool."""


def tool_calls(reply: Any) -> object:
    """Return names and arguments of the tools that an OpenAI reply calls."""
    return [[call.function.name, call.function.arguments] for call in reply.choices[0].message.tool_calls]


def main(cases: Callable[[str, str, list[str]], Cases]) -> None:
    """Run the cases for the URL and model in the arguments and the prompts on standard input."""
    url, model = sys.argv[1:]
    found = cases(url, model, json.load(sys.stdin))
    answers: dict[str, object] = {}
    errors: dict[str, str] = {}
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        futures = {name: pool.submit(case) for name, case in found.items()}
        for name, future in futures.items():
            try:
                answers[name] = future.result()
            except Exception as error:  # noqa: BLE001 (each library has its own; all are results)
                errors[name] = f"{type(error).__name__}: {error}"
    json.dump({"requests": len(found), "errors": errors, "answers": answers}, sys.stdout)
