"""The parameters in docs/policy-*.md match the code."""

from __future__ import annotations

import re
from pathlib import Path

from tailrace import bid_ask
from tailrace.policy.reference import reference

DOCS = Path(__file__).parents[2] / "docs"
CONSTANT = re.compile(r"^\| `([A-Z_]+)` \| `([^`]+)` \|", flags=re.MULTILINE)


def test_documented_constants_of_bid_ask_match_the_code() -> None:
    written = dict(CONSTANT.findall((DOCS / "policy-cascadeinfer.md").read_text()))
    assert written
    assert {name: float(value) for name, value in written.items()} == {
        name: float(getattr(bid_ask, name)) for name in written
    }


def test_the_reference_page_is_up_to_date() -> None:
    page = (DOCS / "policy-parameters.md").read_text()
    assert page == reference(), "python -m tailrace.policy.reference > docs/policy-parameters.md"
