"""The final output of `tailrace up`: addresses, and commands to try."""

from __future__ import annotations

import json
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Final

from tailrace.local.state import RunState
from tailrace.tiny.task import MAX_SCORED_COUNT, task

# The shipped model can answer only these prompts; other models get one that invites a long answer.
_TINY_PROMPTS: Final = (
    task("wxyz", 12, 9).prompt,
    task("wxyz", MAX_SCORED_COUNT, MAX_SCORED_COUNT - 40).prompt,
)
_PROMPTS: Final = (
    "Why is the sky blue? Answer in one sentence.",
    "Write a story of two thousand words about a lighthouse keeper.",
)


def tailrace_command() -> str:
    """Return how this installation's `tailrace` can be typed here: by name if on PATH, else by path."""
    installed = Path(sysconfig.get_path("scripts")) / "tailrace"
    on_path = shutil.which("tailrace")
    if not installed.exists() or (on_path is not None and Path(on_path).samefile(installed)):
        return "tailrace"
    here = Path.cwd()
    return str(installed.relative_to(here)) if installed.is_relative_to(here) else str(installed)


def greeting(state: RunState, logs: Path, command: str) -> str:
    """Text for stdout: addresses, a curl line for a streamed answer, and what to do next.

    `command`: how `tailrace` is typed here.
    """
    workers = "1 worker" if state.workers == 1 else f"{state.workers} workers"
    short, long = _TINY_PROMPTS if state.tiny else _PROMPTS
    return "\n".join(
        [
            "",
            f"Tailrace is up: {workers}, OpenAI API at {state.http}/v1",
            f"  admin API  {state.admin}",
            f"  logs       {logs}",
            "",
            "A streamed answer, with separate reasoning and answer:" if state.tiny else "A streamed answer:",
            "",
            f"  {_curl(state, short)}",
            "",
            "Then start a long one, and migrate it while it streams:",
            "",
            f"  {_curl(state, long)} >/dev/null &",
            f"  {command} get requests",
            f"  {command} migrate REQUEST --to INSTANCE     (any unique part of its ID)",
            f"  {command} top",
            "",
            f"{command} down stops the cluster.",
        ]
    )


def _curl(state: RunState, prompt: str) -> str:
    body = {
        "model": state.model,
        "stream": True,
        "temperature": 0,
        "messages": [{"role": "user", "content": prompt}],
    }
    url = f"{state.http}/v1/chat/completions"
    key = ' -H "Authorization: Bearer $VLLM_API_KEY"' if os.environ.get("VLLM_API_KEY") else ""
    return f"curl -sN {url} -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"
