"""Slow: every process of a cluster of real vLLM engines is restarted, then killed, under fifty streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples import rolling_restart
from examples.fifty_streams import variants
from tailrace.local.restart import find_parts
from tailrace.local.state import RunFolder
from tests.harness.working_folder import WorkingFolder

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(3600)]

STREAMS = 50


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunFolder]:
    """Three vLLM engines, two front ends on one port: an edge takes all streams with it."""
    environment = WorkingFolder(tmp_path)
    flags = ("--workers", "3", "--frontends", "2", "--front", "python")
    up = environment.tailrace("up", *flags, "--port", str(environment.port))
    assert up.returncode == 0, up.stderr
    yield environment.folder
    environment.tailrace("down")


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
def test_clients_do_not_notice_restarts_and_kills(cluster: RunFolder, kill: bool) -> None:
    with cluster.locked():
        state = cluster.read()
        assert state is not None
        rows = rolling_restart.run(cluster, state, list(find_parts(state)), variants(STREAMS), kill)
    assert not rolling_restart.failed(rows)
    if not kill:
        assert [error for row in rows for error in row.tally.errors] == []
