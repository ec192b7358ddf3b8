"""docs/mutants.md has every sampled module; a mutant that is not counted is one of a line that exists."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.mutants.targets import TARGETS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "mutants.md").read_text()
EQUIVALENT = tomllib.loads((ROOT / "tests" / "mutants" / "equivalent.toml").read_text())["mutant"]


def test_equivalent_mutants_refer_to_existing_lines() -> None:
    for each in EQUIVALENT:
        lines = (ROOT / each["module"]).read_text().splitlines()
        assert each["before"] in " ".join(line.strip() for line in lines), each


def test_every_sampled_module_is_listed() -> None:
    for target in TARGETS:
        assert f"`{target.module}`" in PAGE
        assert (ROOT / target.module).is_file()
        assert all((ROOT / test).exists() for test in target.tests)
