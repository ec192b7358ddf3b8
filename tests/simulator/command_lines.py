"""Small workloads and profiles for the tests of the simulator's commands."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from click.testing import CliRunner, Result

from tailrace.cli.main import main
from tests.simulator.worlds import PROFILE


def run_cli(*arguments: object) -> Result:
    """Run the `tailrace` command with these arguments."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def run_cli_ok(*arguments: object) -> Result:
    """Run the command and assert that it succeeds."""
    result = run_cli(*arguments)
    assert result.exit_code == 0, result.output
    return result


def workload(folder: Path, *, count: int = 30, reasoning: int = 20, name: str = "w") -> str:
    """Write a JSONL workload that a small instance serves; return it as the commands take it."""
    rows = [
        {
            "arrival_s": round(n * 0.05, 3),
            "prompt_tokens": 20 + n * 37 % 100,
            "reasoning_tokens": reasoning * (n % 2),
            "answer_tokens": 5 + n * 53 % 60,
        }
        for n in range(count)
    ]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{path}"


def profile(folder: Path) -> Path:
    """Write the profile of the simulator's tests, with 2,000 tokens of KV; return its path."""
    path = folder / "profile.json"
    path.write_bytes(msgspec.json.encode(PROFILE))
    return path
