"""Settings of all tests of local processes."""

from __future__ import annotations

import pytest

from tests.waiting import WAIT_S


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for what was killed to end for as long as a busy machine may take."""
    monkeypatch.setattr("tailrace.local.process._KILL_S", WAIT_S)
