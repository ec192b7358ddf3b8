"""The parameter tables in docs/policy-*.md match the code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Set
from importlib import import_module
from pathlib import Path

import pytest

from tailrace.perf.horizon import Horizon
from tailrace.policy.parameters import Parametrized
from tailrace.policy.reference import reference

PAGES = ("pascal", "ares", "arrow", "cascadeinfer")
DOCS = Path(__file__).parents[2] / "docs"
# Names that a default may use, besides numbers.
NAMES = {"Horizon": Horizon}

TABLE = re.compile(r"^### `([\w.]+)(?::(\w+))?`\n\n\|.*\n\|[-|]+\n((?:\|.*\n)+)", flags=re.MULTILINE)
ROW = re.compile(r"^\| `(\w+)` \| `([^`]+)` \|[^|]*\|[^|]+\|$", flags=re.MULTILINE)


def tables() -> list[tuple[str, str, str, str]]:
    return [(page, *found) for page in PAGES for found in TABLE.findall(text_of(page))]


def text_of(page: str) -> str:
    return (DOCS / f"policy-{page}.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_every_parameter_table_is_parsed(page: str) -> None:
    assert len(TABLE.findall(text_of(page))) == text_of(page).count("\n### ") > 0


@pytest.mark.parametrize(("page", "module", "name", "rows"), tables())
def test_documented_parameters_and_defaults_match_the_code(
    page: str, module: str, name: str, rows: str
) -> None:
    written = {parameter: eval(default, NAMES) for parameter, default in ROW.findall(rows)}
    assert len(written) == rows.count("\n")
    code = import_module(module)
    if name:
        assert written == taken_by(getattr(code, name), {name for _, _, name, _ in tables()})
    else:
        assert written == {key: getattr(code, key) for key in written}


def taken_by(kind: type, documented: Set[str]) -> dict[str, object]:
    """Return what the constructor takes, with the defaults, without the parameters of a class above that has
    a table of its own."""
    own = kind.parameters if issubclass(kind, Parametrized) else ()
    bases = [base for base in kind.__mro__[1:] if issubclass(base, Parametrized)]
    above = {p.name for base in bases if base.__name__ in documented for p in base.parameters}
    arguments = inspect.signature(kind).parameters
    facts = {name: each.default for name, each in arguments.items() if each.kind is not each.VAR_KEYWORD}
    return {p.name: p.default for p in own if p.name not in above} | facts


def test_the_reference_page_is_up_to_date() -> None:
    page = (DOCS / "policy-parameters.md").read_text()
    assert page == reference(), "python -m tailrace.policy.reference > docs/policy-parameters.md"
