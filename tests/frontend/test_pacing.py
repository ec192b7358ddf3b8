"""Answers are shown at the user's pace: in order, each token once, and none later than the pace requires."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend_svc.outputs import NamedOutput, Outputs
from frontend_svc.pacing import Pacer
from frontend_svc.streams import StepVerdict, Stream
from tailrace.cluster import Phase
from tailrace.v1 import scheduler_pb2, worker_pb2
from tailrace.wire.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    encode_outputs,
    read_outputs,
    split_outputs,
)
from tests.frontend.conftest import Rig
from tests.frontend.scripted_worker import FINISHED, PREFILL_DONE, REASONING_ENDED, merge, outputs
from tests.frontend.test_placement import Scheduler, scheduler
from tests.worker.simulated import VirtualClock

PACE_S = 0.1


class Screen:
    """Records what the user sees, and when."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.shown: list[tuple[float, bytes]] = []
        self.pacer = Pacer(self._show, LoopClock(self.clock))

    def _show(self, frames: object) -> None:
        assert isinstance(frames, list)
        self.shown.append((self.clock.time() - 100.0, frames[0]))

    def at(self, when_s: float) -> None:
        """Advance the clock to this time, in seconds."""
        reached: list[bool] = []
        self.clock.call_at(100.0 + when_s, lambda: reached.append(True))
        while not reached:
            self.clock.advance()


def together(*messages: worker_pb2.AttachDown) -> worker_pb2.AttachDown:
    """Combine outputs of several requests to one step."""
    rows = [row for m in messages for row in read_outputs(list(m.outputs.frames)).outputs]
    ended = [row.request_id for row in rows if row.finish_reason is not None]
    return merge(*messages, frames=encode_outputs(rows, ended))


class LoopTimer(asyncio.TimerHandle):
    """Timer of which only `cancel` is used."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel

    def cancel(self) -> None:
        self._cancel()


class LoopClock:
    """Virtual clock whose callbacks take an argument, as those of an event loop."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock

    def time(self) -> float:
        return self.clock.time()

    def call_at(self, when: float, callback: Callable[[int], None], handle: int) -> LoopTimer:
        return LoopTimer(self.clock.call_at(when, lambda: callback(handle)).cancel)


@given(st.lists(st.floats(0.0, 0.4), min_size=1, max_size=30))
def test_outputs_are_shown_at_the_times_of_the_formula(gaps_s: list[float]) -> None:
    screen = Screen()
    screen.pacer.begin(Stream(1, "r", pace_s=PACE_S), 0)
    ready_s, expected, last_s = 0.0, [], -1.0
    for number, gap_s in enumerate(gaps_s):
        ready_s += gap_s
        screen.at(ready_s)
        screen.pacer.put(1, [b"%d" % number], 1, number == len(gaps_s) - 1)
        last_s = max(ready_s, last_s + PACE_S) if number else ready_s
        expected.append(last_s)
    screen.clock.drain()
    assert [message for _, message in screen.shown] == [b"%d" % n for n in range(len(gaps_s))]
    assert [when for when, _ in screen.shown] == pytest.approx(expected, abs=1e-6)
    assert not screen.pacer and screen.pacer.buffered == 0


def test_error_follows_the_last_output_immediately() -> None:
    screen = Screen()
    screen.pacer.begin(Stream(1, "r", pace_s=PACE_S), 1)
    screen.pacer.put(1, [b"a"], 1, False)
    screen.pacer.put(1, [b"error"], 0, True)
    assert screen.shown == []
    screen.clock.drain()
    assert [(round(when, 6), what) for when, what in screen.shown] == [(0.1, b"a"), (0.1, b"error")]


def test_outputs_of_an_aborted_request_are_dropped() -> None:
    screen = Screen()
    screen.pacer.begin(Stream(1, "r", pace_s=PACE_S, name="r"), 1)
    screen.pacer.put(1, [b"a"], 1, True)
    screen.pacer.drop("r")
    screen.clock.drain()
    assert screen.shown == [] and not screen.pacer and screen.pacer.buffered == 0


def test_full_buffer_shows_its_oldest_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend_svc.pacing._STREAM_MAX", 3)
    screen = Screen()
    screen.pacer.begin(Stream(1, "r", pace_s=PACE_S), 1)
    for number in range(5):
        screen.pacer.put(1, [b"%d" % number], 1, number == 4)
    assert [what for _, what in screen.shown] == [b"0", b"1"]
    screen.clock.drain()
    assert [what for _, what in screen.shown] == [b"0", b"1", b"2", b"3", b"4"]


def test_two_answers_of_one_name_are_forgotten_one_by_one() -> None:
    screen = Screen()
    for handle in (1, 2):
        stream = Stream(handle, f"r{handle}", pace_s=PACE_S, name="r")
        screen.pacer.begin(stream, 1)
        screen.pacer.put(handle, [b"%d" % handle], 1, True)
    assert screen.pacer.drop("r") == "r2"
    assert screen.pacer.drop("r") is None
    screen.clock.drain()
    assert [what for _, what in screen.shown] == [b"1"]
    assert not screen.pacer and screen.pacer.buffered == 0


def test_split_outputs_preserves_every_output() -> None:
    rows = [EngineCoreOutput(f"r{n}", [n, n + 1], stop_reason=n) for n in range(3)]
    rest, separate = split_outputs([*encode_outputs(rows, ["r0", "r2"]), b"aux"], [2, 1])
    read = [read_outputs(frames) for frames in (rest, *separate)]
    assert [[o.request_id for o in m.outputs] for m in read] == [["r0"], ["r2"], ["r1"]]
    assert [m.finished_requests for m in read] == [["r0"], ["r2"], None]
    assert [o for m in (read[0], read[2], read[1]) for o in m.outputs] == rows
    assert all(frames[1:] == [b"aux"] for frames in (rest, *separate))
    assert all(isinstance(m, EngineCoreOutputs) for m in read)


async def test_only_requests_that_ask_for_it_are_paced(rig: Rig) -> None:
    worker = await rig.worker("a")
    await rig.front.ready()
    await rig.front.add("slow", extra_args={"tailrace_pace_tpot_ms": 60_000.0})
    slow = await worker.submitted()
    await rig.front.add("fast")
    fast = await worker.submitted()
    worker.send(together(outputs(slow, [1], 0, PREFILL_DONE), outputs(fast, [1], 0, PREFILL_DONE)))
    worker.send(together(outputs(slow, [2], 1, REASONING_ENDED), outputs(fast, [2], 1, REASONING_ENDED)))
    # The first answering token is shown at once, the next a minute later.
    for index in range(2, 6):
        worker.send(together(outputs(slow, [index + 1], index), outputs(fast, [index + 1], index)))
    worker.send(together(outputs(slow, [7], 6, FINISHED), outputs(fast, [7], 6, FINISHED)))
    await rig.front.end_of("fast")
    assert rig.front.tokens["fast"] == [1, 2, 3, 4, 5, 6, 7]
    assert rig.front.tokens["slow"] == [1, 2, 3]
    # It has ended for the instances; its buffered outputs are dropped when its user disconnects.
    assert len(rig.engine.table) == 0 and rig.engine.pacer.buffered == 4
    await rig.front.abort("slow")
    await rig.front.add("next")
    await worker.submitted()
    assert rig.engine.pacer.buffered == 0


async def test_a_policy_paces_what_no_request_and_no_operator_does(rig: Rig) -> None:
    worker = await rig.worker("a")
    leader = Scheduler(lambda request: scheduler_pb2.PlaceReply(instance_id="a", pace_s=60.0))
    async with scheduler(rig.members, "s0", leader):
        await rig.front.ready()
        for name, extra in (("paced", None), ("own", {"tailrace_pace_tpot_ms": 0.0})):
            await rig.front.add(name, extra_args=extra)
            submit = await worker.submitted()
            worker.send(outputs(submit, [1], 0, PREFILL_DONE | REASONING_ENDED))
            worker.send(outputs(submit, [2], 1))
            worker.send(outputs(submit, [3], 2, FINISHED))
        await rig.front.end_of("own")
    assert rig.front.tokens["own"] == [1, 2, 3]
    assert rig.front.tokens["paced"] == [1]
    await rig.front.abort("paced")


async def test_paced_answer_survives_a_crash(rig: Rig) -> None:
    first, second = await rig.worker("a"), await rig.worker("b")
    await rig.front.ready()
    await rig.front.add("r", extra_args={"tailrace_pace_tpot_ms": 1.0})
    submit = await first.submitted()
    first.send(outputs(submit, [1], 0, PREFILL_DONE | REASONING_ENDED))
    for index in range(1, 9):
        first.send(outputs(submit, [index + 1], index))
    await rig.front.tokens_of("r", 9)
    await rig.crash(first)
    again = await second.submitted()
    assert again.answer_tokens == 9 and again.answering_s > 0.0
    second.send(outputs(again, [10], 9, FINISHED))
    await rig.front.end_of("r")
    assert rig.front.tokens["r"] == list(range(1, 11))


def test_name_of_an_answer_that_was_not_shown_to_its_end_is_forgotten() -> None:
    """It has ended for the instances, and its user disconnects before the last token is due."""
    sent: list[Sequence[bytes]] = []
    output, clock = NamedOutput(sent.append, lambda: 0), LoopClock(VirtualClock())
    out = Outputs(output, Pacer(output.send, clock), None)
    stream = Stream(1, "own", name="chosen", pace_s=60.0, phase=Phase.ANSWERING)
    out.begin(stream)
    first, last = (outputs(worker_pb2.Submit(request_id="own"), [token], token) for token in (0, 1))
    step = StepVerdict(flagged=[(stream, 0)])
    out.forward("a", first.outputs, step)
    for message, ended in ((first, False), (last, True)):
        out.send_output(1, list(message.outputs.frames), 1, ended)
    assert output.names == {"own"}
    out.drop("chosen")
    assert output.names == set()
