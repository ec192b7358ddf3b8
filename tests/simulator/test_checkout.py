"""Commands whose code only a checkout has."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.claims.command import claims_command
from simulator.cli import checkout
from tailrace.cli.errors import CliError


def test_a_command_comes_from_the_checkout() -> None:
    assert checkout.experiment("claims", "experiments.claims.command:claims_command") is claims_command


def test_without_a_checkout_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checkout, "find_spec", lambda name: None)
    monkeypatch.setattr(checkout, "_ROOT", tmp_path)
    with pytest.raises(CliError, match=r"^claims: .*experiments/, is not installed .*make install"):
        checkout.experiment("claims", "experiments.claims.command:claims_command")
