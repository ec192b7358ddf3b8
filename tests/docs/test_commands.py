"""Every `tailrace` command in the documentation parses: its options exist and accept the given values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tailrace.cli.main import main
from tailrace.cli.reference import reference

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "deploy/README.md",
    *sorted(ROOT.glob("docs/*.md")),
]
# Generated from the help texts.
GENERATED = {"cli.md"}


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the command lines in code blocks, without abbreviated ones."""
    fenced = False
    for line in re.sub(r"\\\n\s*", " ", page.read_text()).splitlines():
        fenced ^= line.startswith("```")
        found = re.match(r"\s*(?:\$ )?(?:\.venv/bin/)?tailrace (?!\w+:)(.+)", line)
        if not found or not (fenced or line.startswith("    ")):
            continue
        if re.search(r"\.\.\.|[\[|<>;&]|\$\(", found[1]):
            continue
        # Folders have to exist.
        yield ["." if word == "DIR" else word for word in shlex.split(found[1], comments=True)]


CASES = [(page.name, words) for page in PAGES if page.name not in GENERATED for words in commands(page)]


@pytest.mark.parametrize(
    ("page", "words"), CASES, ids=lambda value: " ".join(value) if isinstance(value, list) else value
)
def test_a_documented_command_parses(page: str, words: list[str]) -> None:
    command: click.Command = main
    context = click.Context(main, info_name="tailrace")
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, words)
        assert found is not None
        command, parent = found, context
        context = click.Context(command, info_name=name, parent=parent)
    if "--help" not in words:
        command.make_context(context.info_name, words, parent=context.parent)


def test_pages_with_commands_were_found() -> None:
    assert {"README.md", "tutorial.md", "operations.md"} <= {page for page, _ in CASES}


def test_the_command_reference_is_up_to_date() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    assert page == reference(), "python -m tailrace.cli.reference > docs/cli.md"
