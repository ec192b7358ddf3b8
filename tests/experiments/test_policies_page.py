"""The page of compared policies, when only some of its grounds are run again."""

from __future__ import annotations

from pathlib import Path

from experiments.policies.page import with_parts

PAGE = Path(__file__).parents[2] / "docs" / "policies-compared.md"


def test_grounds_that_are_not_run_again_are_kept() -> None:
    page = "# Title\n\nhead\n\n## A\n\nold a\n\n## B\n\nold b\n"
    assert with_parts(page, "# Title\n\nnew head\n\n## B\n\nnew b\n") == (
        "# Title\n\nnew head\n\n## A\n\nold a\n\n## B\n\nnew b\n"
    )


def test_the_published_page_consists_of_such_parts() -> None:
    text = PAGE.read_text()
    assert with_parts(text, text) == text
