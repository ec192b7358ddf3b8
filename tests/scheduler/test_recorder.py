"""The scheduler's recorder: one recording at a time, of a scheduler that leads."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import grpc
import pytest

from scheduler_svc.admin.errors import AdminError
from scheduler_svc.recorder import Recorder
from tailrace.control.events import TicksForgotten
from tailrace.control.recording import RecordingOverflow, decode
from tailrace.control.replay import Replay, Replayed
from tests.control.recorded import RandomRun

LONG_S = 3_000.0


def leading() -> asyncio.Event:
    """Return the event of a scheduler that leads."""
    event = asyncio.Event()
    event.set()
    return event


async def test_a_recording_has_the_state_and_what_follows() -> None:
    run = RandomRun("pascal", 3)
    recorder = Recorder(run.control, leading())
    async with aclosing(recorder.record(LONG_S)) as recording:
        lines = await anext(recording)
        for _ in range(30):
            run.step()
        lines += await anext(recording)
    replayed: list[Replayed] = []
    Replay(decode(lines), replayed.append).run()
    assert replayed and all(each.same for each in replayed)
    # Nothing is recorded any more, and another recording may begin.
    assert run.control.model.tap is None and run.control.runner.watchers == []
    async with aclosing(recorder.record(LONG_S)) as recording:
        assert await anext(recording)


async def test_a_second_recording_is_refused() -> None:
    recorder = Recorder(RandomRun("pascal", 3).control, leading())
    async with aclosing(recorder.record(LONG_S)) as recording:
        await anext(recording)
        with pytest.raises(AdminError, match="in progress already; try again when it has ended"):
            await anext(recorder.record(LONG_S))


async def test_a_recording_ends_when_another_scheduler_leads() -> None:
    run, leads = RandomRun("pascal", 3), leading()
    async with aclosing(Recorder(run.control, leads).record(LONG_S)) as recording:
        lines = await anext(recording)
        leads.clear()
        run.control.handle(TicksForgotten())
        lines += await anext(recording)
        assert isinstance(list(decode(lines))[-1], TicksForgotten)
        with pytest.raises(AdminError, match="does not lead any more") as caught:
            await anext(recording)
    assert caught.value.code is grpc.StatusCode.ABORTED


async def test_a_slow_reader_gets_the_beginning() -> None:
    run = RandomRun("pascal", 3)
    async with aclosing(Recorder(run.control, leading(), bytes_max=12_000).record(LONG_S)) as recording:
        lines = await anext(recording)
        for _ in range(120):
            run.step()
        lines += [line async for some in recording for line in some]
    assert isinstance(list(decode(lines))[-1], RecordingOverflow)
    replayed: list[Replayed] = []
    replay = Replay(decode(lines), replayed.append)
    replay.run()
    assert replayed and all(each.same for each in replayed)
    assert replay.ends_early == "its reader could not keep up"
