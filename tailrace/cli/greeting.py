"""The last words of `tailrace up`: where everything is, and lines to try that work."""

from __future__ import annotations

import json
from pathlib import Path

from tailrace.local.state import RunState
from tailrace.tiny.task import MAX_SCORED_COUNT, task

_SHORT = task("wxyz", 12, 9).prompt
_LONG = task("wxyz", MAX_SCORED_COUNT, MAX_SCORED_COUNT - 40).prompt


def greeting(state: RunState, logs: Path) -> str:
    """Text for stdout: addresses, a curl line for a streamed answer, and what to do next."""
    count = sum(part.tier == "worker" for part in state.parts)
    workers = "1 worker" if count == 1 else f"{count} workers"
    return "\n".join(
        [
            "",
            f"Tailrace is up: {workers}, OpenAI API at {state.http}/v1",
            f"  admin API  {state.admin}",
            f"  logs       {logs}",
            "",
            "A streamed answer, reasoning and answer apart:",
            "",
            f"  {_curl(state, _SHORT)}",
            "",
            "Then start a long one, and move it while it streams:",
            "",
            f"  {_curl(state, _LONG)} >/dev/null &",
            "  tailrace get requests",
            "  tailrace migrate REQUEST --to INSTANCE     (any part of the id that only it has)",
            "  tailrace top",
            "",
            "tailrace down stops it all.",
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
    return f"curl -sN {url} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
