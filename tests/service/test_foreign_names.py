"""Names that another package lacks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from tailrace.foreign_names import missing, names

MODULE = "a_package_of_others"


class Base:
    def __init__(self) -> None:
        self.set_at_start = 1

        def later() -> None:
            self.set_later = 2

        later()


@dataclass
class Engine(Base):
    declared: int

    @property
    def asked(self) -> int:
        self.cached = 3
        return self.cached

    def step(self, batch: int, *, fast: bool = False) -> None:
        """Do nothing."""

    def anything(self, **rest: int) -> None:
        """Accept any parameters."""


@pytest.fixture(autouse=True)
def module() -> Iterator[ModuleType]:
    module = ModuleType(MODULE)
    module.Engine = Engine  # type: ignore[attr-defined]
    sys.modules[MODULE] = module
    yield module
    del sys.modules[MODULE]


def test_declared_and_assigned_attributes_are_found() -> None:
    members = "declared set_at_start set_later asked cached step(batch, fast) anything(more)"
    assert missing({MODULE: "Engine(declared)", f"{MODULE}:Engine": members}) == []


@pytest.mark.parametrize(
    ("owner", "text", "missing_name"),
    [
        ("no_such_package.at_all", "Engine", "no_such_package.at_all"),
        (MODULE, "Motor", f"{MODULE}:Motor"),
        (f"{MODULE}:Motor", "step", f"{MODULE}:Motor"),
        (f"{MODULE}:Engine", "step stop", f"{MODULE}:Engine.stop"),
        (f"{MODULE}:Engine", "step(batch, slow)", f"{MODULE}:Engine.step(slow)"),
    ],
)
def test_missing_names_are_listed(owner: str, text: str, missing_name: str) -> None:
    assert missing({owner: text}) == [missing_name]


def test_other_import_errors_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_another.py").write_text("import an_absent_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="an_absent_package"):
        missing({"needs_another": "anything"})


def test_all_names_of_a_specification() -> None:
    assert names({"a": "B c(d)", "a:E": "f"}) == {"B", "c", "E", "f"}
