"""docs/mutants.md lists every mutant that is excluded from the count."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.mutants.targets import TARGETS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "mutants.md").read_text()
EQUIVALENT = tomllib.loads((ROOT / "tests" / "mutants" / "equivalent.toml").read_text())["mutant"]


def test_every_equivalent_mutant_is_listed_with_its_reason() -> None:
    rows = {
        f"| `{each['module']}` | `{each['before']}` | `{each['after']}` | {each['because']} |"
        for each in EQUIVALENT
    }
    listed = {line for line in PAGE.splitlines() if line.count("|") == 5 and line.startswith("| `")}
    assert listed == rows


def test_equivalent_mutants_refer_to_existing_lines() -> None:
    for each in EQUIVALENT:
        lines = (ROOT / each["module"]).read_text().splitlines()
        assert each["before"] in " ".join(line.strip() for line in lines), each


def test_every_sampled_module_is_listed() -> None:
    for target in TARGETS:
        assert f"`{target.module}`" in PAGE
        assert (ROOT / target.module).is_file()
        assert all((ROOT / test).exists() for test in target.tests)
