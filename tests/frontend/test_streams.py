"""The arbiter under any order of events: exactly once, in order, from the current epoch only."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from frontend_svc.adopt import Commit, Wait, evaluate
from frontend_svc.observer import Load, load_of
from frontend_svc.streams import (
    FAILED,
    FINISHED,
    PREFILL_DONE,
    REASONING_ENDED,
    MalformedStep,
    Reject,
    Stream,
    StreamTable,
)
from tailrace.cluster import Phase
from tailrace.v1 import worker_pb2
from tailrace.v1.worker_pb2 import StepOutputs

INSTANCES = ["a", "b", "c"]
LENGTH = 12


def add_entry(
    step: StepOutputs, handle: int, epoch: int, first: int, tokens: list[int], flags: int = 0
) -> None:
    step.handles.append(handle)
    step.epochs.append(epoch)
    step.first_indices.append(first)
    step.counts.append(len(tokens))
    step.token_ids.extend(tokens)
    step.flags.append(flags)


@dataclass
class Copy:
    """A request as one instance sees it."""

    stream: Stream
    instance: str
    epoch: int
    index: int


def token(stream: Stream, index: int) -> int:
    """Return the token that every instance decodes at this index."""
    return stream.handle * 1000 + index


class Arbiter(RuleBasedStateMachine):
    """Instances decode, messages are delayed, streams are moved and handed over at any moment.

    `delivered` is the user's side: the tokens that the API server would have received.
    """

    copies: Bundle[Copy] = Bundle("copies")

    def __init__(self) -> None:
        super().__init__()
        self.table = StreamTable()
        self.delivered: dict[Stream, list[int]] = {}
        self.finished: set[Stream] = set()
        self.wires: dict[str, deque[StepOutputs]] = {instance: deque() for instance in INSTANCES}

    @rule(target=copies, instance=st.sampled_from(INSTANCES))
    def new(self, instance: str) -> Copy:
        stream = self.table.open(f"r{len(self.delivered)}")
        self.table.assign(stream, instance)
        self.delivered[stream] = []
        return Copy(stream, instance, 0, 0)

    @rule(copy=copies, count=st.integers(1, 3), data=st.data())
    def decode(self, copy: Copy, count: int, data: st.DataObject) -> None:
        """Decode on an instance, whether it still owns the request or not."""
        last = min(copy.index + count, LENGTH)
        if copy.index == LENGTH:
            return
        tokens = [token(copy.stream, index) for index in range(copy.index, last)]
        flags = FINISHED if last == LENGTH else 0
        wire = self.wires[copy.instance]
        if not wire or data.draw(st.booleans()) or copy.stream.handle in wire[-1].handles:
            wire.append(StepOutputs())
        add_entry(wire[-1], copy.stream.handle, copy.epoch, copy.index, tokens, flags)
        copy.index = last

    @rule(instance=st.sampled_from(INSTANCES))
    def deliver(self, instance: str) -> None:
        """Deliver the oldest message of an instance."""
        if not self.wires[instance]:
            return
        step = self.wires[instance].popleft()
        streams = {handle: self.table.get(handle) for handle in step.handles}
        verdict = self.table.accept(instance, step)
        keep = verdict.keep or [True] * len(step.handles)
        offset = 0
        for handle, count, flags, kept in zip(step.handles, step.counts, step.flags, keep, strict=True):
            stream = streams[handle]
            if kept:
                assert stream is not None and stream not in self.finished
                self.delivered[stream].extend(step.token_ids[offset : offset + count])
                if flags & FINISHED:
                    self.finished.add(stream)
            offset += count
        # Links and copies preserve the order, so an owner never leaves a gap.
        assert not verdict.failed

    @rule(target=copies, lost=st.sampled_from(INSTANCES), to=st.sampled_from(INSTANCES), drop=st.booleans())
    def lose(self, lost: str, to: str, drop: bool) -> MultipleResults[Copy]:
        """Lose an instance: after a crash (`drop`) its messages are lost, after a hang they arrive later."""
        if drop:
            self.wires[lost].clear()
        orphans = self.table.orphan_all(lost)
        resumed = []
        for stream in orphans:
            self.table.assign(stream, to)
            resumed.append(Copy(stream, to, stream.epoch, stream.accepted))
        return multiple(*resumed)

    @rule(target=copies, source=consumes(copies), to=st.sampled_from(INSTANCES), ahead=st.integers(0, 2))
    def migrate(self, source: Copy, to: str, ahead: int) -> Copy:
        """Adopt a paused request; tokens may be in flight, or the source may be stale."""
        adopt = worker_pb2.Adopt(
            handle=source.stream.handle,
            request_id=source.stream.request_id,
            from_epoch=source.epoch,
            epoch=source.epoch + 1,
            next_index=source.index,
        )
        for _ in range(ahead):
            self.deliver(source.instance)
        verdict = evaluate(self.table, source.stream, to, adopt)
        if isinstance(verdict, Commit):
            assert source.stream.accepted == source.index
            assert verdict.source == source.instance
            self.table.hand_over(source.stream, to, adopt.epoch)
            return Copy(source.stream, to, adopt.epoch, source.index)
        if isinstance(verdict, Wait):
            assert source.stream.accepted < source.index
        return source

    @rule(copy=copies)
    def close(self, copy: Copy) -> None:
        """Close the stream, as when the client disconnects."""
        self.table.close(copy.stream)
        self.finished.add(copy.stream)

    @invariant()
    def exactly_once(self) -> None:
        for stream, tokens in self.delivered.items():
            assert tokens == [token(stream, index) for index in range(len(tokens))]
            assert list(stream.token_ids) == tokens
            if len(tokens) == LENGTH:
                assert not self.table.is_live(stream)

    @invariant()
    def counts_match_the_live_streams(self) -> None:
        owners = Counter(stream.owner for stream in self.table)
        for instance in INSTANCES:
            assert self.table.count_owned(instance) == owners[instance]


Arbiter.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestArbiter = Arbiter.TestCase


def open_owned(table: StreamTable, instance_id: str = "a", request_id: str = "r") -> Stream:
    """Open a stream and assign it to an instance."""
    stream = table.open(request_id)
    table.assign(stream, instance_id)
    return stream


def single_entry_step(
    stream: Stream, epoch: int, first: int, tokens: list[int], flags: int = 0
) -> StepOutputs:
    """Return a step with one entry."""
    step = StepOutputs()
    add_entry(step, stream.handle, epoch, first, tokens, flags)
    return step


@pytest.mark.parametrize(
    ("sender", "epoch", "first", "flags", "reason"),
    [
        ("b", 0, 0, 0, Reject.NOT_OWNER),
        ("a", 1, 0, 0, Reject.STALE_EPOCH),
        ("a", 0, 1, 0, Reject.INDEX),
        ("a", 0, 0, FAILED, Reject.FAILED),
    ],
)
def test_rejected_outputs_state_the_reason(
    sender: str, epoch: int, first: int, flags: int, reason: Reject
) -> None:
    table = StreamTable()
    stream = open_owned(table)
    verdict = table.accept(sender, single_entry_step(stream, epoch, first, [5], flags))
    assert verdict.rejected == [(stream.handle, reason)]
    assert verdict.keep == [False]
    assert stream.accepted == 0


def test_owner_that_skips_a_token_loses_the_stream() -> None:
    table = StreamTable()
    stream = open_owned(table)
    verdict = table.accept("a", single_entry_step(stream, 0, 3, [5]))
    assert verdict.failed == [stream]
    assert (stream.owner, stream.epoch, stream.failures) == (None, 1, 1)


def test_malformed_columns_change_nothing() -> None:
    table = StreamTable()
    stream = open_owned(table)
    short = single_entry_step(stream, 0, 0, [5])
    short.flags.clear()
    missing = single_entry_step(stream, 0, 0, [5])
    missing.token_ids.clear()
    for step in (short, missing):
        with pytest.raises(MalformedStep):
            table.accept("a", step)
    assert stream.accepted == 0 and table.is_live(stream)


def test_handles_wrap_around_and_skip_live_ones() -> None:
    table = StreamTable()
    first = table.open("first")
    table._last_handle = 0xFFFFFFFF
    second = table.open("second")
    assert (first.handle, second.handle) == (1, 2)


def test_phases_are_entered_once_even_if_flagged_repeatedly() -> None:
    table = StreamTable()
    stream = open_owned(table)
    assert table.accept("a", single_entry_step(stream, 0, 0, [1], PREFILL_DONE)).flagged == [
        (stream, PREFILL_DONE)
    ]
    phases = [stream.phase]
    assert table.accept("a", single_entry_step(stream, 0, 1, [1], PREFILL_DONE)).flagged == []
    ended = table.accept("a", single_entry_step(stream, 0, 2, [1], REASONING_ENDED | FINISHED))
    assert ended.flagged == [(stream, REASONING_ENDED | FINISHED)]
    phases.append(stream.phase)
    assert phases == [Phase.REASONING, Phase.ANSWERING]


def test_prefill_is_followed_by_answering_without_a_reasoning_parser() -> None:
    table = StreamTable(Phase.ANSWERING)
    stream = open_owned(table)
    table.accept("a", single_entry_step(stream, 0, 0, [1], PREFILL_DONE))
    assert stream.phase is Phase.ANSWERING


def test_output_without_tokens_adds_none() -> None:
    table = StreamTable()
    stream = open_owned(table)
    step = single_entry_step(stream, 0, 0, [], FINISHED)
    # Tokens of another stream in the same message.
    other = open_owned(table, request_id="q")
    add_entry(step, other.handle, 0, 0, [7, 8, 9])
    verdict = table.accept("a", step)
    assert verdict.tokens == 3
    assert (list(stream.token_ids), list(other.token_ids)) == ([], [7, 8, 9])


def test_initial_state_of_a_stream() -> None:
    stream = StreamTable().open("r")
    assert (stream.owner, stream.epoch, stream.accepted) == (None, 0, 0)
    assert (stream.failures, stream.losses, stream.deaths) == (0, 0, 0)
    assert (stream.tokens_at_loss, stream.tokens_at_placement) == (0, 0)
    assert not stream.reached_engine and stream.exclusive_until_s == 0.0
    assert (stream.prompt_tokens, stream.max_tokens, stream.pace_s) == (0, 0, None)
    assert (stream.phase, stream.first_token_s, stream.first_answer_s) == (Phase.PREFILL, None, None)
    # By default it generates text without an adapter; its first progress check counts as progress.
    assert (stream.requirements.generates, stream.requirements.adapter) == (True, False)
    assert stream.last_progress != (stream.epoch, stream.accepted)


def test_stream_reached_engine_after_confirmation_or_first_token() -> None:
    table = StreamTable()
    stream = open_owned(table)
    # Confirmations of another instance, epoch or handle are ignored.
    for instance_id, handle, epoch in (("b", stream.handle, 0), ("a", stream.handle, 1), ("a", 99, 0)):
        table.confirm_on_engine(instance_id, handle, epoch)
        assert not stream.reached_engine
    table.confirm_on_engine("a", stream.handle, 0)
    assert stream.reached_engine
    table.orphan(stream)
    table.assign(stream, "b")
    assert not stream.reached_engine
    table.accept("b", single_entry_step(stream, 1, 0, [5]))
    assert stream.reached_engine
    # Tokens of an earlier instance prove nothing about the new one; a migration brings the request.
    table.orphan(stream)
    table.assign(stream, "c")
    assert not stream.reached_engine
    table.hand_over(stream, "a", 5)
    assert stream.reached_engine


@pytest.mark.parametrize(
    ("flags", "phase"),
    [
        (0, Phase.PREFILL),
        (PREFILL_DONE, Phase.REASONING),
        (PREFILL_DONE | REASONING_ENDED, Phase.ANSWERING),
        (PREFILL_DONE | REASONING_ENDED | FINISHED, Phase.ANSWERING),
    ],
)
def test_restored_stream_continues_in_the_phase_of_its_flags(flags: int, phase: Phase) -> None:
    table = StreamTable()
    stream = table.open("r")
    table.restore(stream, [7, 8], flags, "model")
    assert (list(stream.token_ids), stream.phase, stream.model) == ([7, 8], phase, "model")
    plain = StreamTable(Phase.ANSWERING)
    stream = plain.open("r")
    plain.restore(stream, [7, 8], flags, "model")
    assert stream.phase is (Phase.ANSWERING if flags else Phase.PREFILL)


def test_table_keeps_no_state_of_an_instance_without_streams() -> None:
    table = StreamTable()
    first, second = open_owned(table), open_owned(table, request_id="q")
    table.close(first)
    assert list(table._by_owner) == ["a"]
    table.close(second)
    assert not table._by_owner


def test_load_counts_what_instances_say_of_their_own_streams_at_most() -> None:
    table = StreamTable()
    for number, owner in enumerate(["a", "a", "b", ""]):
        stream = table.open(f"r{number}")
        if owner:
            table.assign(stream, owner)
    said = worker_pb2.EngineState
    engines = {"b": said(waiting=2**32 - 1, kv_usage=-1e308), "c": said(waiting=7, kv_usage=math.inf)}
    assert load_of(table, engines) == Load(running=2, waiting=2, kv_usage=0.0)
    assert load_of(table, {"a": said(waiting=1, kv_usage=9.0), **engines}) == Load(1, 3, 0.5)
    assert load_of(StreamTable(), {}) == Load()
