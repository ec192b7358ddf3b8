"""docs/workloads.md is complete, and its examples work."""

from __future__ import annotations

import re
from pathlib import Path

from simulator.workloads import jsonl
from simulator.workloads.generators import GENERATORS, SESSIONS
from simulator.workloads.resolve import FORMATS

PAGE = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text()


def test_every_generator_and_format_is_on_the_page() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE))
    assert GENERATORS.keys() | SESSIONS.keys() | FORMATS.keys() <= named


def test_the_jsonl_example_is_readable(tmp_path: Path) -> None:
    (example,) = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    path = tmp_path / "example.jsonl"
    path.write_text(example)
    assert [request.output_tokens for request in jsonl.load(path).requests] == [1830, 120]


def test_the_python_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(example.replace('"r1.jsonl"', repr(str(tmp_path / "r1.jsonl"))), "workloads.md", "exec"), {})
    assert len(jsonl.load(tmp_path / "r1.jsonl").requests) == 500
