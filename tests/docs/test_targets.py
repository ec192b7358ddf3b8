"""Every `make` target and every module that the documentation runs exists, and the targets stay few."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
LISTED = re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE)
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
TEXT = "\n".join(page.read_text() for page in [*PAGES, *ROOT.glob("docs/**/*.md")])
# In code, since prose has the verb.
TARGETS = re.findall(r"(?:`|^ {4})make ((?:[a-z][a-z-]*[a-z](?![a-z-]) ?)+)", TEXT, re.MULTILINE)
MODULES = re.findall(r"python -m ((?:benchmarks|experiments|tests)(?:\.[a-z_]+)+)", TEXT)


def test_the_targets_fit_on_a_screen() -> None:
    assert 0 < len(LISTED) <= 25


@pytest.mark.parametrize("target", sorted({name for names in TARGETS for name in names.split()}))
def test_a_documented_target_exists(target: str) -> None:
    assert target in (*LISTED, "help")


@pytest.mark.parametrize("module", sorted(set(MODULES)))
def test_a_documented_module_can_be_run(module: str) -> None:
    spec = find_spec(module)
    assert spec is not None
    assert not spec.submodule_search_locations or find_spec(f"{module}.__main__") is not None
