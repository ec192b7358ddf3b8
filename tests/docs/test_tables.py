"""Every table has its separator line; without it, the table is rendered as one paragraph."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _headless_tables(page: Path) -> list[str]:
    lines = re.sub(r"(?ms)^```.*?^```$", "", page.read_text()).splitlines()
    return [
        f"{page.relative_to(ROOT)}: {line}"
        for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False)
        if re.match(r"\|.*\|$", line)
        and not before.startswith("|")
        and not re.fullmatch(r"\|[ :|-]+\|", after)
    ]


def test_every_table_has_a_header() -> None:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    pages = [ROOT / name for name in listed.stdout.split()]
    assert len(pages) > 40
    assert [problem for page in pages for problem in _headless_tables(page)] == []
