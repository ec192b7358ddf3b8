"""`tailrace restart`, and the rolling restart of a cluster under load without client errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from examples import rolling_restart
from tailrace.cli.main import main
from tailrace.local.plan import PartSpec, Tier
from tailrace.local.process import PartProcess, stop_part
from tailrace.local.progress import Progress
from tailrace.local.restart import Restarter, find_parts
from tailrace.local.state import Part, RunFolder, RunFolderUnusable, RunState, identify
from tests.e2e.conftest import RUST_FRONT
from tests.full_disk import files_end_at
from tests.harness.working_folder import WorkingFolder

WORK: rolling_restart.Work = [
    (f"Prompt {number} of a rolling restart.", {"max_tokens": 200, "extra_body": {"min_tokens": 200}})
    for number in range(8)
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkingFolder:
    monkeypatch.delenv("TAILRACE_RUN_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    return WorkingFolder(tmp_path)


def restart(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["restart", *arguments])


def test_restart_without_a_cluster_is_an_error(here: WorkingFolder) -> None:
    result = restart("worker-0")
    assert result.exit_code == 1
    assert f"no local cluster is running in {here.path}" in result.stderr


@pytest.mark.parametrize("arguments", [(), ("worker-0", "--all")])
def test_restart_takes_names_or_all(here: WorkingFolder, arguments: Sequence[str]) -> None:
    result = restart(*arguments)
    assert result.exit_code == 2
    assert "name the processes to restart, or pass --all" in result.stderr


async def test_nothing_stops_or_starts_that_cannot_be_recorded(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    spec = PartSpec("worker-0", Tier.WORKER, ["sleep", "60"], "")
    running = PartProcess(spec, folder.logs / "worker-0.log", {})
    state = RunState(admin="127.0.0.1:1", parts=[running.part])
    restarter = Restarter(folder, state, Progress())
    try:
        with files_end_at(100):
            with pytest.raises(RunFolderUnusable, match="File too large"):
                await restarter.restart("worker-0", 0.0)
            with pytest.raises(RunFolderUnusable, match="File too large"):
                restarter.launch(replace(spec, name="worker-1"))
        worker, more = state.parts
        assert worker.identity.alive() and not more.identity.alive()
    finally:
        stop_part(running.part, 0.0, running.reap)


async def test_a_restart_that_is_interrupted_is_done_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, go_on, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def exchange(self: Restarter, *_: object) -> None:
        begun.set()
        await go_on.wait()
        done.set()

    monkeypatch.setattr(Restarter, "_restart", exchange)
    restarter = Restarter(RunFolder(tmp_path), RunState(), Progress("tailrace restart"))
    restarting = asyncio.create_task(restarter.restart("worker-0"))
    await begun.wait()
    restarting.cancel()
    await asyncio.sleep(0)
    assert not restarting.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await restarting
    assert done.is_set() and "worker-0 is still restarted" in capsys.readouterr().err


def test_restart_of_an_unknown_part_is_an_error(here: WorkingFolder) -> None:
    part = Part(identity=identify(1), log="", spec=PartSpec("worker-0", Tier.WORKER, [], ""))
    with here.folder.locked():
        here.folder.write(RunState(http="http://127.0.0.1:1", admin="127.0.0.1:1", parts=[part]))
    result = restart("worker-1")
    assert result.exit_code == 1
    assert "no process 'worker-1'; there are worker-0" in result.stderr


def test_the_order_of_a_rolling_restart() -> None:
    me = identify(1)
    tiers = (Tier.FRONTEND, Tier.ETCD, Tier.WORKER, Tier.CONTROL)
    parts = [Part(identity=me, log="", spec=PartSpec(tier.value, tier, [], "")) for tier in tiers]
    assert list(find_parts(RunState(parts=parts))) == ["etcd", "control", "worker", "frontend"]


@pytest.fixture
def cluster(here: WorkingFolder) -> Iterator[RunFolder]:
    """Start two simulated workers, and two front ends on one port."""
    if not RUST_FRONT.exists():
        pytest.skip("no vllm-rs")
    up = here.up("--workers", "2", "--frontends", "2", "--no-traces")
    assert up.returncode == 0, up.stderr
    yield here.folder
    here.tailrace("down")


@pytest.mark.fleet
@pytest.mark.slow
def test_a_rolling_restart_causes_no_client_errors(cluster: RunFolder, here: WorkingFolder) -> None:
    with cluster.locked():
        state = cluster.read()
        assert state is not None
        drained = rolling_restart.run(
            cluster, state, ["scheduler", "worker-0", "frontend-0"], WORK, kill=False
        )
        killed = rolling_restart.run(cluster, state, ["worker-1"], WORK, kill=True)
    for row in (*drained, *killed):
        assert (row.tally.errors, row.tally.different) == ([], 0), row
    assert not rolling_restart.failed([*drained, *killed])
    # On a busy machine, no answer may finish during the short restart of a single service.
    assert all(row.streams for row in drained)
    assert any(row.tally.finished for row in drained)
    # The written state is valid for `down` and `restart`.
    again = here.tailrace("restart", "worker-0", "etcd")
    assert again.returncode == 0, again.stderr
    assert "restarted worker-0: " in again.stdout and "restarted etcd: " in again.stdout
