"""Replaying a recording gives the same decisions, whenever the recording began."""

from __future__ import annotations

import io
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.actions import Action, Migrate, Place, Refuse
from tailrace.cluster import Arrival, ClusterView
from tailrace.control.recording import (
    Decided,
    InvalidRecordingError,
    Started,
    decode,
    encode,
    recorded_answer,
)
from tailrace.control.replay import Replay, Replayed
from tailrace.control.shadow import Comparison, Shadow, Verdict, outcome
from tailrace.policy.least_loaded import LeastLoaded
from tailrace.records import PolicyRecord
from tailrace.slo import Slo
from tests.control.recorded import INSTANCES, RandomRun

POLICIES = (
    "pascal",
    "ares",
    "arrow",
    "cascade",
    "tailrace",
    "tailrace copy_ahead=true pull_margin=0",
    "least_loaded",
)


def run_of(policy: str, seed: int, before: int = 40, after: int = 80) -> RandomRun:
    """Return a run with `before` unrecorded and `after` recorded steps."""
    run = RandomRun(policy, seed)
    for _ in range(before):
        run.step()
    run.record()
    for _ in range(after):
        run.step()
    return run


@settings(max_examples=40, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 1 << 20),
    before=st.integers(0, 80),
    after=st.integers(0, 120),
)
def test_a_replay_makes_the_same_decisions(policy: str, seed: int, before: int, after: int) -> None:
    run = run_of(policy, seed, before, after)
    replayed: list[Replayed] = []
    replay = Replay(decode(run.lines), replayed.append)
    replay.run()
    assert [each for each in replayed if not each.same] == []
    assert len(replayed) == sum(isinstance(event, Decided) for event in decode(run.lines))
    # The final model equals the recorded one.
    now, then = replay.control.model.view(), run.control.model.view()
    assert dict(now.instances) == dict(then.instances) and now.stages == then.stages
    assert _encoded(replay.control.state(0.0)) == _encoded(run.control.state(0.0))


def _encoded(state: object) -> bytes:
    """Encode the state as in a recording, but with a deterministic order of sets."""
    return msgspec.json.encode(state, order="deterministic")


def test_a_different_decision_is_reported() -> None:
    run = run_of("least_loaded", 1)
    at = next(n for n, line in enumerate(run.lines) if b'"place"' in line)
    decided = msgspec.json.decode(run.lines[at], type=Decided)
    answer = recorded_answer(Place("elsewhere"))
    run.lines[at] = encode(Decided(decided.point, decided.policy, decided.request_id, answer))
    replayed: list[Replayed] = []
    replay = Replay(decode(run.lines), replayed.append)
    replay.run()
    (different,) = [each for each in replayed if not each.same]
    assert (different.point, different.recorded) == ("place", answer)
    assert +replay.different == {"place": 1}


def test_a_missing_question_is_reported() -> None:
    run = run_of("least_loaded", 2)
    lines = [line for line in run.lines if b'"event":"tick"' not in line]
    ticks = sum(b'"tick"' in line for line in lines)
    assert ticks
    replayed: list[Replayed] = []
    Replay(decode(lines), replayed.append).run()
    unasked = [each for each in replayed if each.replayed is None]
    assert len(unasked) == ticks and not any(each.same for each in unasked)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 20), data=st.data())
def test_a_recording_may_end_anywhere_after_its_state(seed: int, data: st.DataObject) -> None:
    run = run_of("arrow", seed, before=20, after=30)
    whole = b"".join(line + b"\n" for line in run.lines)
    state = sum(len(line) + 1 for line in run.lines[: 1 + len(INSTANCES)])
    part = whole[: data.draw(st.integers(state, len(whole)))]
    replayed: list[Replayed] = []
    replay = Replay(decode(io.BytesIO(part)), replayed.append)
    replay.run()
    assert all(each.same for each in replayed)
    # A line that lacks nothing but its end is complete.
    complete = part.endswith(b"\n") or part.split(b"\n")[-1] in run.lines
    assert bool(replay.ends_early) is not complete


def test_a_shadow_gets_every_question_of_the_active_policy() -> None:
    run = run_of("round_robin", 3)
    compared: list[Comparison] = []
    replay = Replay(decode(run.lines), lambda replayed: None)
    replay.watch(Shadow(PolicyRecord(name="least_loaded"), Slo(), compared.append))
    replay.run()
    assert len(compared) == replay.decisions.total()
    assert {each.verdict for each in compared} == {Verdict.SAME, Verdict.DIFFERENT}
    assert {each.policy for each in compared} == {"round_robin"}


def test_errors_of_a_shadow_are_counted_and_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(LeastLoaded):
        def place(self, view: ClusterView, arrival: Arrival, now: float) -> Place | Refuse:
            raise RuntimeError("an error in the policy")

        def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
            raise RuntimeError("again")

    run = RandomRun("least_loaded", 4)
    shadow = Shadow(PolicyRecord(name="least_loaded"), Slo(), lambda compared: None)
    shadow.active.policy = Failing()
    run.control.follow_shadow(shadow)
    for _ in range(60):
        run.step()
    assert all(verdict is not Verdict.DIFFERENT for _, verdict in shadow.counts)
    assert any(verdict is Verdict.FAILED for _, verdict in shadow.counts)
    # Logged once for each decision point, not for each call.
    assert len([r for r in caplog.records if r.name == "tailrace.control.guard"]) == 2
    run.control.follow_shadow(None)
    assert run.control.runner.watchers == []


def test_reasons_are_not_compared() -> None:
    one, other = Migrate("r", "a", "b", "x"), Migrate("r", "a", "b", "y")
    assert outcome([one]) == outcome((other,))
    assert outcome([one]) != outcome([Migrate("r", "a", "c", "x")])
    assert outcome(Place("a", (one,))) == outcome(Place("a", (other,)))
    assert outcome(Refuse("full")) == outcome(Refuse("no"))
    assert outcome(()) != outcome([one])
    assert recorded_answer([one]) != recorded_answer([other])


def test_an_invalid_recording_is_reported_with_its_line() -> None:
    run = run_of("least_loaded", 5, 0, 3)
    with pytest.raises(InvalidRecordingError, match="line 2: "):
        list(decode([run.lines[0], b"{}\n"]))
    with pytest.raises(InvalidRecordingError, match="line 2: another recording begins"):
        list(decode([run.lines[0], run.lines[0]]))
    with pytest.raises(InvalidRecordingError, match="line 1: not the start"):
        Replay(decode(run.lines[-1:]), lambda replayed: None)
    with pytest.raises(InvalidRecordingError, match="empty"):
        Replay(decode([]), lambda replayed: None)
    later = run.lines[0].replace(b'"format":2', b'"format":3')
    with pytest.raises(InvalidRecordingError, match=r"format 3, of Tailrace .*; this one reads 2;"):
        list(decode([later]))
    # Also if the rest of the line is not as this version expects it.
    with pytest.raises(InvalidRecordingError, match="format 3"):
        list(decode([later.replace(b'"slo"', b'"aims"')]))
    assert isinstance(next(decode(run.lines)), Started)


def test_blank_lines_of_a_recording_are_skipped() -> None:
    lines = run_of("least_loaded", 5, 0, 3).lines
    spaced = [b"\n", *(part for line in lines for part in (line + b"\n", b"\r\n")), b" "]
    assert len(list(decode(spaced))) == len(lines)
    with pytest.raises(InvalidRecordingError, match="line 2: not the start"):
        list(decode([b"\n", b"{}\n"]))
