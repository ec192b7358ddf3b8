"""Settings of all tests of the store."""

from __future__ import annotations

import pytest

from tests.waiting import WAIT_S


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no call fail because etcd, or this process, waits for a core of a busy machine."""
    monkeypatch.setattr("tailrace.store.client._DEADLINE_S", WAIT_S)
