"""There are no import cycles, not even for types, and commands import only what they need."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.structure.import_graph import find_cycle, import_graph
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[2]


def packages() -> list[str]:
    """Return the repository's packages, from the import linter's settings."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: list[str] = config["tool"]["importlinter"]["root_packages"]
    return found


def test_no_import_cycles() -> None:
    graph = import_graph(ROOT, packages())

    # The graph is not empty.
    assert "tailrace.store.store" in graph["tailrace.store.registration"]
    assert find_cycle(graph) == []


@pytest.mark.parametrize(
    "back",
    [
        "import pair.one",
        "from pair import one",
        "from pair.one import ONE",
        "from . import one",
        "from .one import ONE",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pair.one import ONE",
        "def late() -> None:\n    from pair.one import ONE",
    ],
)
def test_cycles_are_found_for_every_kind_of_import(tmp_path: Path, back: str) -> None:
    package = tmp_path / "pair"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("from pair.two import TWO\n")
    (package / "two.py").write_text(f"{back}\n")

    found = find_cycle(import_graph(tmp_path, ["pair"]))

    assert found[0] == found[-1]
    assert set(found) == {"pair.one", "pair.two"}


def test_a_command_that_prints_json_imports_no_more_than_that() -> None:
    """Scripts run many: each of these takes a tenth of its time or more."""
    unneeded = {"importlib.metadata", "numpy", "prometheus_client", "rich.console", "yaml"}
    modules = "tailrace.cli.main, tailrace.cli.get"
    code = f"import sys, {modules}; print(*sorted({unneeded} & sys.modules.keys()))"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True, timeout=WAIT_S
    )
    assert printed.stdout == "\n"
