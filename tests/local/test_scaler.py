"""The scaler: which workers it starts and stops, and what it does about those that fail."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tailrace.local import scaler as scaler_module
from tailrace.local.plan import DEVICES, PartSpec, ScaledModel, Tier
from tailrace.local.process import stop_parts
from tailrace.local.scaler import Scaler, _read, difference, freest
from tailrace.local.state import Identity, Part, RunFolder, RunState, identify
from tests.waiting import WAIT_S

# Ends on SIGTERM when the file that its first argument names exists.
_WORKER = """
import os, signal, sys, time
stopping = []
signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))
print("up", flush=True)
while not (stopping and os.path.exists(sys.argv[1])):
    time.sleep(0.02)
"""
_ENDED = Identity(1, 1, "")


def specs(count: int, program: str = "", *arguments: str) -> list[PartSpec]:
    """Return workers that run a Python program."""
    command = [sys.executable, "-c", program, *arguments, "--etcd", "", "--listen", "", "--metrics", ""]
    names = [f"worker-{number}" for number in range(count)]
    return [
        PartSpec(name, Tier.WORKER, command, "", members=[name], scaled=True, timeout_s=WAIT_S)
        for name in names
    ]


def model(workers: list[PartSpec], least: int = 0) -> ScaledModel:
    return ScaledModel("m", least, len(workers), 0.0, ["scheduler"], workers)


def part(name: str, identity: Identity | None = None, leaving: bool = False, gpus: str = "") -> Part:
    """Return a worker that runs as this process, if it is not told otherwise."""
    spec = PartSpec(name, Tier.WORKER, [], "", environment={DEVICES: gpus})
    identity = identity or identify(os.getpid())
    return Part(identity=identity, log="", spec=spec, leaving=leaving)


def changes(parts: list[Part], wanted: int) -> tuple[list[str], list[str], list[str]]:
    start, stop, ended = difference(model(specs(4)), parts, wanted)
    return [each.name for each in start], [each.name for each in stop], [each.name for each in ended]


def test_the_first_free_workers_start_and_the_last_ones_stop() -> None:
    assert changes([], 2) == (["worker-0", "worker-1"], [], [])
    running = [part("worker-3"), part("worker-1"), part("scheduler")]
    assert changes(running, 3) == (["worker-0"], [], [])
    assert changes(running, 2) == ([], [], [])
    assert changes(running, 0) == ([], ["worker-3", "worker-1"], [])


def test_one_that_leaves_does_not_count_and_one_that_has_ended_starts_again() -> None:
    parts = [part("worker-0", leaving=True), part("worker-1", _ENDED), part("worker-2")]
    assert changes(parts, 2) == (["worker-1"], [], ["worker-1"])
    assert changes(parts, 4) == (["worker-1", "worker-3"], [], ["worker-1"])


def test_a_worker_gets_the_gpus_that_the_fewest_others_use() -> None:
    parts = [part("a", gpus="0,1"), part("b", gpus="2"), part("c", _ENDED, gpus="4,5"), part("d", gpus="3")]
    assert freest(["0,1", "2,3", "4,5"], parts) == "4,5"
    assert freest(["0,1", "2,3"], [*parts, part("e", gpus="2")]) == "0,1"
    assert freest(["0", "1"], []) == "0"


def test_the_numbers_are_read_from_a_page_of_metrics() -> None:
    page = 'x{model="m"} 9\ntailrace_desired_instances{model="a \\"b\\""} 2.0\n# HELP tailrace_desired x\n'
    assert _read(page) == {'a "b"': 2.0}
    assert _read("tailrace_desired_instances 1\n") == {}
    with pytest.raises(ValueError):
        _read('tailrace_desired_instances{model="m"} many\n')


class World:
    """A run folder, and what the schedulers say."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        self.folder.logs.mkdir()
        self.desired: dict[str, float] = {}
        self.scaler = Scaler(self.folder)

    def write(self, *scaled: ScaledModel) -> None:
        self.folder.write(RunState(scaled=[*scaled], http="http://x", etcd="127.0.0.1:1"))

    def parts(self) -> list[Part]:
        state = self.folder.read()
        assert state is not None
        return state.parts

    async def until(self, condition: Callable[[list[Part]], bool]) -> None:
        """Run rounds until the parts are so."""
        async with asyncio.timeout(WAIT_S):
            while True:
                await self.scaler.round()
                if condition(self.parts()):
                    return
                await asyncio.sleep(0.01)


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    found = World(tmp_path)
    monkeypatch.setattr(scaler_module, "desired_instances", lambda state: found.desired)
    yield found
    await found.scaler.close()
    stop_parts(found.parts(), found.scaler._reap)


def names(parts: list[Part]) -> list[str]:
    return [each.name for each in parts if each.identity.alive() and not each.leaving]


async def test_it_follows_the_number_and_lets_workers_drain(world: World, tmp_path: Path) -> None:
    drained = tmp_path / "drained"
    world.write(model(specs(2, _WORKER, str(drained))))
    await world.scaler.round()
    assert world.parts() == []  # nobody says how many
    world.desired["m"] = 5.0
    await world.until(lambda parts: names(parts) == ["worker-0", "worker-1"])
    await world.until(lambda parts: all(Path(each.log).read_text() for each in parts))
    started = [each.spec for each in world.parts()]
    addresses = [spec.option(flag) for spec in started for flag in ("--listen", "--metrics")]
    assert len(set(addresses)) == 4 and {spec.option("--etcd") for spec in started} == {"127.0.0.1:1"}
    world.desired["m"] = 1.0
    await world.until(lambda parts: [each.leaving for each in parts] == [False, True])
    world.desired.clear()
    await world.scaler.round()
    # One that drains is not told again, also not by another scaler; it is not counted either.
    await world.scaler.close()
    world.scaler = Scaler(world.folder)
    world.desired["m"] = 1.0
    await world.scaler.round()
    assert [each.identity.alive() for each in world.parts()] == [True, True]
    drained.touch()
    await world.until(lambda parts: [each.name for each in parts] == ["worker-0"])


async def test_while_another_command_has_the_folder_nothing_changes(world: World) -> None:
    world.write(model(specs(1, _WORKER, "/dev/null")))
    world.desired["m"] = 1.0
    with world.folder.locked():
        await world.scaler.round()
        assert world.parts() == []
    await world.until(lambda parts: names(parts) == ["worker-0"])


async def test_one_that_fails_is_started_again_after_a_pause(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It stands still, as the pause may be over before this process runs again.
    now_s = time.monotonic()
    monkeypatch.setattr(scaler_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    # Nobody says how many another model needs.
    idle = replace(model([replace(specs(1)[0], name="n-worker-0")]), model="n")
    world.write(model(specs(1, "raise SystemExit('Error: no GPU is free')")), idle)
    world.desired["m"] = 1.0
    await world.until(lambda parts: parts != [])
    await world.until(lambda parts: parts == [])
    assert "exited while starting (exit code 1): no GPU is free" in caplog.text
    assert "worker-0 has ended" in caplog.text and "the next start is in" in caplog.text
    await world.scaler.round()
    assert world.parts() == []
    known = world.scaler._models["m"]
    delays = [known.failed(known.failed_s) for _ in range(20)]
    assert 2.5 <= delays[0] <= 10.0 and 150.0 <= delays[-1] <= 300.0
    # Room comes free.
    state = RunState(
        scaled=[model(specs(1, _WORKER, "/dev/null"))],
        http="http://x",
        parts=[part("x", _ENDED, leaving=True)],
    )
    world.folder.write(state)
    await world.scaler._see_off(part("x", _ENDED))
    await world.until(lambda parts: "worker-0" in names(parts))


async def test_the_least_is_kept_whatever_is_asked_for(world: World) -> None:
    world.write(model(specs(2, _WORKER, "/dev/null"), least=1))
    world.desired["m"] = 0.0
    await world.until(lambda parts: names(parts) == ["worker-0"])
