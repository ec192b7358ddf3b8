"""Settings that are declared once give a command its options, and the command gets them whole."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import click
import pytest
from click.testing import CliRunner

from tailrace.numeric import WholeRange
from tailrace.service.settings import OneOf, empty_setting, options_of, setting, settings_options


class Kind(enum.Enum):
    LARGE = "large"
    SMALL = "small"


@dataclass(frozen=True, slots=True)
class Inner:
    """Nested settings."""

    most: int = setting(3, "How many.", "--at-most", type=WholeRange(min=1))
    # No option.
    own: int = 9


@dataclass(frozen=True, slots=True)
class Outer:
    """Settings of a command."""

    name: str = ""
    kind: Kind = setting(Kind.SMALL, "Which.", type=OneOf(Kind))
    inner: Inner = Inner()
    verbose: bool = setting(False, "Say more.", is_flag=True)
    extras: Mapping[str, str] = empty_setting(
        dict,
        "More.",
        "--extra",
        multiple=True,
        callback=lambda c, p, given: dict(e.split("=") for e in given),
    )


@click.command()
@settings_options(Outer, "outer")
@click.argument("word")
def command(outer: Outer, word: str) -> None:
    """Run."""
    click.echo(f"{word} {outer}")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], Outer()),
        (
            ["--kind", "large", "--at-most", "7", "--verbose", "--extra", "a=b"],
            Outer("", Kind.LARGE, Inner(7), True, {"a": "b"}),
        ),
    ],
)
def test_a_command_gets_its_settings_whole(arguments: list[str], expected: Outer) -> None:
    assert CliRunner().invoke(command, [*arguments, "word"]).output == f"word {expected}\n"


def test_options_are_named_and_bounded_as_declared() -> None:
    help_text = CliRunner().invoke(command, ["--help"]).output
    assert "--kind [large|small]     Which.  [default: small]" in help_text
    assert "--at-most INTEGER RANGE  How many.  [default: 3; x>=1]" in help_text
    assert "--verbose                Say more.\n" in help_text
    assert options_of(Inner) == {"most": "--at-most"}
    refused = CliRunner().invoke(command, ["--at-most", "0", "word"])
    assert refused.exit_code == 2 and "'--at-most'" in refused.output
