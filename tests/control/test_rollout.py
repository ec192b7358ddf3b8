"""Starting, advancing and undoing a rollout, and its invariants."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tailrace.model_identity import covers, fingerprint
from tailrace.rollout.facts import FleetFacts, FrontEndFacts, InstanceFacts, list_some
from tailrace.rollout.progress import STEP_S, advance, capacity_warning, describe, unmet_condition
from tailrace.rollout.record import RolloutRecord, RolloutState
from tailrace.rollout.requests import Problem, RolloutRefused, begin, check_forgettable, undo

OLD, NEW, THIRD = "text:old:bf16", "text:new:bf16", "text:third:bf16"
FRONT = FrontEndFacts("f0", "chat", "text:old", "/old", frozenset({OLD, NEW}))


def instance(name: str, key: str = OLD, **facts: object) -> InstanceFacts:
    """Return an instance that can take requests unless `facts` say otherwise."""
    known = InstanceFacts(name, key, f"/{key.split(':')[1]}")
    return replace(known, **facts)  # type: ignore[arg-type]


def fleet(*instances: InstanceFacts, fronts: tuple[FrontEndFacts, ...] = (FRONT,)) -> FleetFacts:
    return FleetFacts({i.instance_id: i for i in instances}, {f.frontend_id: f for f in fronts})


TWO = fleet(instance("a"), instance("b"), instance("c", NEW))


def begin_rollout(
    facts: FleetFacts = TWO, to: str = "/new", present: RolloutRecord | None = None
) -> RolloutRecord:
    return begin("chat", to, facts, present, 100.0, 60.0)


def refusal(facts: FleetFacts, to: str = "/new", present: RolloutRecord | None = None) -> RolloutRefused:
    with pytest.raises(RolloutRefused) as caught:
        begin("chat", to, facts, present, 100.0, 60.0)
    return caught.value


# ---- starting and undoing


@pytest.mark.parametrize(
    "to", ["/new", NEW, fingerprint(NEW), fingerprint(NEW)[:4], fingerprint(NEW).upper()]
)
def test_a_model_is_named_by_fingerprint_key_or_path(to: str) -> None:
    record = begin_rollout(to=to)
    assert (record.before, record.new, record.in_force) == (OLD, NEW, OLD)
    assert (record.state, record.begun_s, record.prepare_s) == (RolloutState.PREPARING, 100.0, 60.0)


def test_the_old_model_is_identified_as_exactly_as_possible() -> None:
    two_formats = fleet(instance("a"), instance("b", "text:old:fp8"), instance("c", NEW))
    assert begin_rollout(two_formats).before == "text:old"
    # From one precision to the other: instances of the other precision are the old ones.
    record = begin_rollout(two_formats, to=fingerprint("text:old:fp8"))
    assert (record.before, record.new) == (OLD, "text:old:fp8")
    assert (record.retires("text:old:bf16"), record.retires("text:old:fp8")) == (True, False)
    back = undo("chat", two_formats, replace_record(record, RolloutState.DRAINING), 110.0, 60.0)
    assert (back.new, back.retires("text:old:fp8"), back.retires("text:old:bf16")) == (OLD, True, False)
    # With three precisions, the previous state cannot be restored by a single fingerprint.
    three = fleet(*two_formats.instances.values(), instance("e", "text:old:int8"))
    record = replace_record(begin_rollout(three, to="text:old:fp8"), RolloutState.DONE)
    assert record.before == "text:old"
    with pytest.raises(RolloutRefused, match="went to several precisions before"):
        undo("chat", three, record, 110.0, 60.0)
    # All old instances are gone already.
    assert begin_rollout(fleet(instance("c", NEW))).before == "text:old"


def test_a_front_end_without_weights_is_matched_by_model_name() -> None:
    front = replace(FRONT, key="text", model="/old")
    assert begin_rollout(fleet(*TWO.instances.values(), fronts=(front,))).before == OLD
    error = refusal(fleet(instance("c", NEW), fronts=(front,)))
    assert "no weights to tell it by" in str(error)


def test_front_ends_of_both_models_can_coexist() -> None:
    second = replace(FRONT, frontend_id="f1", key="text:new", model="/new")
    record = begin_rollout(fleet(*TWO.instances.values(), fronts=(FRONT, second)))
    assert record.before == OLD
    third = replace(FRONT, frontend_id="f2", key="text:third", model="/third")
    error = refusal(
        fleet(*TWO.instances.values(), instance("d", THIRD), fronts=(FRONT, second, third)),
    )
    assert "front ends serve several models as chat" in str(error)


@pytest.mark.parametrize(
    ("facts", "to", "problem", "message"),
    [
        (fleet(*TWO.instances.values(), fronts=()), "/new", Problem.UNKNOWN, "they serve: none"),
        (TWO, "/nowhere", Problem.UNKNOWN, f"no instance runs '/nowhere'; there are: {fingerprint(NEW)} (c)"),
        (TWO, fingerprint(NEW)[:3], Problem.UNKNOWN, "no instance runs"),
        (TWO, "/old", Problem.NOT_NOW, f"new requests of chat go to {fingerprint(OLD)} already"),
        (
            fleet(instance("a"), instance("c", NEW, unavailable="is suspect")),
            "/new",
            Problem.NOT_NOW,
            f"no instance of {fingerprint(NEW)} is warm: c is suspect",
        ),
        (
            fleet(instance("a"), instance("c", "other:new:bf16")),
            "/new",
            Problem.NOT_NOW,
            "has another configuration or tokenizer than that of f0",
        ),
        (
            fleet(instance("a"), instance("c", NEW), instance("d", "text:new:fp8")),
            "/new",
            Problem.AMBIGUOUS,
            "'/new' is several models",
        ),
    ],
)
def test_a_rollout_is_refused_with_the_reason(
    facts: FleetFacts, to: str, problem: Problem, message: str
) -> None:
    error = refusal(facts, to)
    assert error.problem is problem
    assert message in str(error)


def test_a_rollout_needs_instances_that_accept_adapters() -> None:
    old, new = instance("a", takes_adapters=True), instance("c", NEW)
    assert "no warm one of" in str(refusal(fleet(old, new)))
    assert begin_rollout(fleet(old, replace(new, takes_adapters=True))).new == NEW
    assert begin_rollout(fleet(instance("a"), replace(new, takes_adapters=True))).new == NEW


def test_one_rollout_at_a_time_and_repeating_it_continues() -> None:
    record = begin_rollout()
    assert begin_rollout(present=record) is record
    more = fleet(*TWO.instances.values(), instance("d", THIRD))
    assert "is under way (preparing)" in str(refusal(more, "/third", record))
    done = replace_record(record, RolloutState.DONE)
    assert begin_rollout(present=done) is done
    failed = replace_record(record, RolloutState.FAILED)
    again = begin_rollout(present=failed)
    assert again.newer_than(failed) and again == msgspec.structs.replace(record, begun_s=again.begun_s)
    following = begin_rollout(more, "/third", done)
    assert (following.before, following.new) == (NEW, THIRD)


def replace_record(record: RolloutRecord, state: RolloutState) -> RolloutRecord:
    return msgspec.structs.replace(record, state=state)


def test_a_record_of_replaced_front_ends_does_not_count() -> None:
    """The front ends were replaced by ones with another tokenizer, which use their own model."""
    done = replace_record(begin_rollout(), RolloutState.DONE)
    front = replace(FRONT, key="other:first", model="/first")
    instances = (instance("a", "other:first"), instance("b", "other:second"))
    record = begin_rollout(fleet(*instances, fronts=(front,)), "/second", done)
    assert (record.before, record.new) == ("other:first", "other:second")
    with pytest.raises(RolloutRefused, match="have another configuration or tokenizer by now"):
        undo("chat", fleet(*instances, fronts=(front,)), done, 110.0, 60.0)
    # Without front ends, only the record is known.
    assert (
        begin_rollout(fleet(instance("c", NEW), instance("d", THIRD), fronts=()), "/third", done).before
        == NEW
    )


def test_a_rollout_is_undone() -> None:
    record = begin_rollout()
    failed_because = undo("chat", TWO, record, 110.0, 60.0)
    assert (failed_because.state, failed_because.reason, failed_because.in_force) == (
        RolloutState.FAILED,
        "an operator took it back",
        OLD,
    )
    with pytest.raises(RolloutRefused, match="has changed nothing"):
        undo("chat", TWO, failed_because, 111.0, 60.0)
    with pytest.raises(RolloutRefused, match="there is no rollout of chat"):
        undo("chat", TWO, None, 111.0, 60.0)
    back = undo("chat", TWO, replace_record(record, RolloutState.DRAINING), 110.0, 60.0)
    assert (back.in_force, back.new, back.draining, back.undoes) == (NEW, OLD, [], True)
    with pytest.raises(RolloutRefused, match=f"no instance of {fingerprint(OLD)} is warm: there is none"):
        undo("chat", fleet(instance("c", NEW)), replace_record(record, RolloutState.DONE), 110.0, 60.0)


def test_undoing_twice_does_not_restore_the_new_model() -> None:
    """A second operator does this, or the same one after losing the first reply."""
    back = undo("chat", TWO, replace_record(begin_rollout(), RolloutState.DRAINING), 110.0, 60.0)
    for state in (RolloutState.PREPARING, RolloutState.DRAINING, RolloutState.DONE):
        record = replace_record(back, state)
        assert undo("chat", TWO, record, 120.0, 60.0) is record
    # A failed one is retried.
    again = undo("chat", TWO, replace_record(back, RolloutState.FAILED), 120.0, 60.0)
    assert (again.before, again.new, again.undoes) == (NEW, OLD, True)
    # Forward again only by an explicit target, and not before the requests' destination is settled.
    error = refusal(TWO, "/new", back)
    assert "is under way (preparing); wait for its end" in str(error) and "undo" not in str(error)
    for state in (RolloutState.DRAINING, RolloutState.DONE):
        forward = begin_rollout(present=replace_record(back, state))
        assert (forward.before, forward.new, forward.undoes) == (OLD, NEW, False)


def test_a_record_can_be_forgotten_once_front_ends_are_restarted() -> None:
    record = begin_rollout()
    with pytest.raises(RolloutRefused, match="is under way"):
        check_forgettable("chat", TWO, record)
    done = replace_record(record, RolloutState.DONE)
    with pytest.raises(RolloutRefused, match=r"f0: started with another model .* restart"):
        check_forgettable("chat", TWO, done)
    restarted = replace(FRONT, key="text:new", model="/new")
    check_forgettable("chat", fleet(*TWO.instances.values(), fronts=(restarted,)), done)
    with pytest.raises(RolloutRefused, match="there is no rollout"):
        check_forgettable("chat", TWO, None)
    # A front end without weights is matched by model name.
    by_name = replace(FRONT, key="text")
    with pytest.raises(RolloutRefused, match="f0: started with another model"):
        check_forgettable("chat", fleet(*TWO.instances.values(), fronts=(by_name,)), done)
    by_name = replace(by_name, model="/new")
    check_forgettable("chat", fleet(*TWO.instances.values(), fronts=(by_name,)), done)
    # Front ends cannot distinguish precisions.
    formats = fleet(instance("a"), instance("b", "text:old:fp8"))
    done = replace_record(begin_rollout(formats, "text:old:fp8"), RolloutState.DONE)
    with pytest.raises(RolloutRefused, match="a: without the record new requests would go there, too"):
        check_forgettable("chat", formats, done)
    check_forgettable("chat", fleet(instance("b", "text:old:fp8")), done)


# ---- advancing


def test_new_requests_switch_once_every_front_end_is_connected() -> None:
    record = begin_rollout()
    far = replace(FRONT, frontend_id="f1", connected=frozenset({OLD}))
    facts = fleet(*TWO.instances.values(), fronts=(FRONT, far))
    assert advance(record, facts, 110.0, 10.0) is record
    assert describe(record, facts) == f"preparing: f1: connected to no instance of {fingerprint(NEW)}"
    failed = advance(record, facts, 160.0, 60.0)
    assert (failed.state, failed.in_force, failed.ended_s) == (RolloutState.FAILED, OLD, 160.0)
    assert "f1: connected to no instance" in describe(failed, facts)
    # Front ends of another name or with another tokenizer do not count.
    others = (replace(far, name="other"), replace(far, frontend_id="f2", key="other:old"))
    switched = advance(record, fleet(*TWO.instances.values(), fronts=(FRONT, *others)), 110.0, 10.0)
    assert (switched.state, switched.in_force, switched.switched_s) == (RolloutState.DRAINING, NEW, 110.0)


def draining(facts: FleetFacts, now_s: float = 200.0, *names: str, step_s: float = 190.0) -> RolloutRecord:
    record = replace_record(begin_rollout(), RolloutState.DRAINING)
    return advance(
        msgspec.structs.replace(record, draining=[*names], step_s=step_s), facts, now_s, now_s - step_s
    )


def test_old_instances_are_drained_one_after_another() -> None:
    loaded = [instance("a", requests=5), instance("b", requests=2), instance("c", NEW)]
    first = draining(fleet(*loaded))
    assert (first.draining, first.step_s) == (["b"], 200.0)
    assert draining(fleet(*loaded), 200.0, "b").draining == ["b"]
    description = describe(draining(fleet(*loaded), 200.0, "b"), fleet(*loaded))
    left = f"7 requests left on {fingerprint(OLD)}, 0 moving; draining b; 1 to drain"
    assert description == f"new requests go to {fingerprint(NEW)}; {left}"
    # One long answer does not delay the others forever. The last one stays: if b is lost, its requests must
    # continue somewhere.
    assert draining(fleet(*loaded), 190.0 + STEP_S, "b").draining == ["b"]
    three = fleet(*loaded, instance("d", requests=9))
    assert draining(three, 190.0 + STEP_S, "b").draining == ["b", "a"]
    assert draining(three, 250.0 + STEP_S, "b", "a", step_s=220.0).draining == ["b", "a"]
    emptied = fleet(instance("a", requests=5), instance("b", empty=True), instance("c", NEW))
    assert draining(emptied, 200.0, "b").draining == ["b", "a"]
    # Without an instance of the new model, draining stops: the rollout may have to be undone.
    cold = fleet(
        instance("a", requests=5), instance("b", empty=True), instance("c", NEW, unavailable="stops")
    )
    waiting = draining(cold, 200.0, "b")
    assert waiting.draining == ["b"]
    assert "they are refused" in describe(waiting, cold) and "c stops" in describe(waiting, cold)
    # Once it is gone or restarted with the new model, the others follow.
    restarted = fleet(instance("a", requests=5), instance("b", NEW), instance("c", NEW))
    assert draining(restarted, 200.0, "b").draining == ["a"]
    done = draining(fleet(instance("a", empty=True), instance("c", NEW)), 200.0, "a", "b")
    assert (done.state, done.ended_s, done.draining) == (RolloutState.DONE, 200.0, ["a"])
    assert describe(done, TWO).startswith(f"done: new requests go to {fingerprint(NEW)}")


def test_the_next_instance_drains_after_at_most_one_step() -> None:
    three = fleet(instance("a"), instance("b"), instance("d"), instance("c", NEW))
    assert draining(three, 190.0 + STEP_S - 0.1, "a").draining == ["a"]
    assert draining(three, 190.0 + STEP_S, "a").draining == ["a", "b"]


def test_progress_is_described_in_words() -> None:
    record = replace_record(begin_rollout(), RolloutState.DRAINING)
    goes = f"new requests go to {fingerprint(NEW)}"
    for requests, moving, left in ((0, 0, "0 requests"), (1, 1, "1 request"), (2, 0, "2 requests")):
        facts = fleet(instance("a", requests=requests, moving=moving), instance("c", NEW, requests=9))
        words = f"{goes}; {left} left on {fingerprint(OLD)}, {moving} moving; 1 to drain"
        assert describe(record, facts) == words
    # The number of requests is unknown.
    known = FleetFacts({"a": InstanceFacts("a", OLD, "/old"), "c": InstanceFacts("c", NEW, "/new")}, {})
    assert "; 0 requests left" in describe(record, known) and ", 0 moving" in describe(record, known)
    # If requests are refused, the message says what to do: after an undo, start a new rollout.
    cold = fleet(instance("a"), instance("c", NEW, unavailable="stops"))
    assert describe(record, cold).endswith("tailrace rollout undo chat")
    back = msgspec.structs.replace(record, undoes=True)
    assert describe(back, cold).endswith(f"tailrace rollout start chat --to {fingerprint(OLD)}")
    done = replace_record(record, RolloutState.DONE)
    assert describe(done, TWO) == f"done: {goes}, and no request of {fingerprint(OLD)} is left"
    undone = replace_record(back, RolloutState.DONE)
    assert describe(undone, TWO).startswith(f"done: {goes} again, and")
    assert describe(begin_rollout(), TWO).startswith("prepared: new requests are about to go to")


def test_another_name_on_the_new_model_keeps_no_old_instances() -> None:
    other = replace(FRONT, frontend_id="f1", name="code", key="text:new", model="/new")
    done = replace_record(begin_rollout(), RolloutState.DONE)
    facts = replace(fleet(instance("c", NEW), fronts=(FRONT, other)), rollouts={"chat": done})
    assert describe(done, facts).endswith(f"no request of {fingerprint(OLD)} is left")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("", ""),
        ("a", "a"),
        ("abc", "a, b, c"),
        ("abcd", "a, b, c and 1 more"),
        ("abcdef", "a, b, c and 3 more"),
    ],
)
def test_at_most_three_names_are_listed(names: str, words: str) -> None:
    assert list_some([*names]) == words


def test_instances_used_by_another_name_do_not_drain() -> None:
    other = replace(FRONT, frontend_id="f1", name="code")
    by_name = replace(other, key="text")
    record = replace_record(begin_rollout(), RolloutState.DRAINING)
    shared = (instance("a", requests=2), instance("b", "text:old:fp8"), instance("c", NEW))
    for front in (other, by_name):
        facts = fleet(*shared, fronts=(FRONT, front))
        done = advance(record, replace(facts, rollouts={"chat": record}), 200.0, 0.0)
        assert (done.state, done.draining) == (RolloutState.DONE, [])
        description = describe(done, replace(facts, rollouts={"chat": done}))
        assert description.endswith(f"and code keeps a of {fingerprint(OLD)}")
    # They drain once the other name uses the new model as well.
    both = {"chat": record, "code": msgspec.structs.replace(record, model="code")}
    assert advance(
        record, replace(fleet(*shared, fronts=(FRONT, other)), rollouts=both), 200.0, 0.0
    ).draining == ["a"]
    # Front ends of another model use none of them.
    third = replace(other, key="text:third")
    assert advance(record, fleet(*shared, fronts=(FRONT, third)), 200.0, 0.0).draining == ["a"]


@given(
    st.lists(st.sampled_from(["text", "text:a", "text:a:x", "text:ab", "other:a"]), min_size=2, max_size=2)
)
def test_a_short_key_covers_only_its_extensions(keys: list[str]) -> None:
    short, key = keys
    parts, longer = short.split(":"), key.split(":")
    assert covers(short, key) is (longer[: len(parts)] == parts)


class Operation(RuleBasedStateMachine):
    """Random starts and losses of workers, requests, disconnections of front ends, and operator commands."""

    @initialize()
    def open(self) -> None:
        self.now_s = 100.0
        self.instances = {"a": OLD, "b": OLD, "c": NEW}
        self.bad: set[str] = set()
        self.requests = {"a": 3, "b": 1, "c": 0}
        self.connected = True
        self.record: RolloutRecord | None = None
        # The step that the present leader waits for, and for how long it has waited.
        self.step: object = None
        self.waited_s = 0.0

    def draining(self) -> set[str]:
        """Return the draining instances as membership does: listed ones that still run the old model."""
        record = self.record
        if record is None:
            return set()
        return {n for n in record.draining if n in self.instances and record.retires(self.instances[n])}

    def facts(self) -> FleetFacts:
        drained = self.draining()
        found = [
            instance(
                name,
                key,
                unavailable="is suspect" if name in self.bad else "",
                requests=self.requests[name],
                empty=name in drained and not self.requests[name],
            )
            for name, key in self.instances.items()
        ]
        front = replace(FRONT, connected=frozenset({OLD, NEW} if self.connected else {OLD}))
        return fleet(*found, fronts=(front,))

    @rule(name=st.sampled_from("abcd"), key=st.sampled_from([OLD, NEW]))
    def start_instance(self, name: str, key: str) -> None:
        self.instances[name], self.requests[name] = key, 0

    @rule(name=st.sampled_from("abcd"))
    def remove_instance(self, name: str) -> None:
        self.instances.pop(name, None)
        self.requests.pop(name, None)

    @rule(name=st.sampled_from("abcd"))
    def toggle_suspect(self, name: str) -> None:
        self.bad ^= {name}

    @rule()
    def toggle_connection(self) -> None:
        self.connected = not self.connected

    @rule()
    def add_request(self) -> None:
        takes = OLD if self.record is None else self.record.in_force
        able = [n for n, key in self.instances.items() if covers(takes, key) and n not in self.bad]
        # The model that takes new requests never drains.
        assert not self.draining() & set(able)
        if able:
            self.requests[able[0]] += 1

    @rule(name=st.sampled_from("abcd"))
    def finish_requests(self, name: str) -> None:
        if name in self.requests:
            self.requests[name] = 0

    @rule(to=st.sampled_from(["/old", "/new"]))
    def begin_by_operator(self, to: str) -> None:
        try:
            self.record = begin("chat", to, self.facts(), self.record, self.now_s, 60.0)
        except RolloutRefused as error:
            assert str(error)

    @precondition(lambda self: self.record is not None)
    @rule()
    def undo_by_operator(self) -> None:
        try:
            self.record = undo("chat", self.facts(), self.record, self.now_s, 60.0)
        except RolloutRefused as error:
            assert str(error)

    def wait(self, record: RolloutRecord, seconds: float) -> float:
        """Return the seconds waited, counted like a leader from when it first saw the step."""
        self.waited_s = self.waited_s + seconds if self.step == record.step else 0.0
        self.step = record.step
        return self.waited_s

    @rule(skew_s=st.sampled_from([-1000.0, 1000.0]))
    def change_leader(self, skew_s: float) -> None:
        self.now_s += skew_s
        self.step = None

    @precondition(lambda self: self.record is not None)
    @rule(seconds=st.sampled_from([0.0, 1.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        assert self.record is not None
        self.now_s += seconds
        facts, before = self.facts(), self.record
        self.record = after = advance(before, facts, self.now_s, self.wait(before, seconds))
        if after.state is RolloutState.FAILED and before.state is RolloutState.PREPARING:
            assert self.waited_s >= before.prepare_s
        if after.in_force != before.in_force:
            assert unmet_condition(before, facts) == ""
        assert set(after.draining) - set(before.draining) <= {
            name for name, key in self.instances.items() if before.retires(key)
        }
        if after.state is RolloutState.DONE and before.state is not RolloutState.DONE:
            assert all(not self.requests[n] for n, key in self.instances.items() if before.retires(key))
        assert describe(after, facts)

    @invariant()
    def nothing_drains_during_preparation(self) -> None:
        record = getattr(self, "record", None)
        if record is not None and record.state is RolloutState.PREPARING:
            assert not record.draining

    def teardown(self) -> None:
        """Assert that the rollout completes in a healthy fleet."""
        record = getattr(self, "record", None)
        if record is None:
            return
        self.bad, self.connected = set(), True
        self.instances |= {"a": OLD, "c": NEW}
        for name in self.instances:
            self.requests[name] = 0
        for _ in range(20):
            self.now_s += STEP_S
            waited_s = self.wait(record, STEP_S)
            self.record = record = advance(record, self.facts(), self.now_s, waited_s)
        assert not record.under_way


TestOperation = Operation.TestCase


def test_a_later_rollout_is_newer_whatever_the_clocks_say() -> None:
    """Front ends that learn of both from several sources depend on this."""
    first = begin_rollout()
    over = replace_record(first, RolloutState.DONE)
    assert over.newer_than(first) and not first.newer_than(over) and not first.newer_than(first)
    back = undo("chat", TWO, over, 10.0, 60.0)
    again = begin("chat", "/new", TWO, replace_record(back, RolloutState.DONE), 10.0, 60.0)
    assert again.newer_than(back) and back.newer_than(over)


def test_traffic_switches_once_enough_instances_are_warm() -> None:
    old_instances = [instance(f"o{number}") for number in range(5)]
    cold = [instance("d", NEW, unavailable="has not reported yet"), instance("e", NEW)]
    facts = fleet(*old_instances, instance("c", NEW), *cold)
    record = begin_rollout(facts)
    assert record.min_warm == 3, "half of the old ones, rounded up"
    assert unmet_condition(record, facts) == f"2 of 3 instances of {fingerprint(NEW)} are warm (--min-warm)"
    assert advance(record, facts, 110.0, 10.0) is record
    description = f"2 warm of {fingerprint(NEW)} will replace 5 of {fingerprint(OLD)}; "
    assert (
        capacity_warning(record, facts) == f"{description}new requests go there once 3 are warm (--min-warm)"
    )
    # An operator can lower the number at the start or while preparing; later it has no effect.
    less = begin("chat", "/new", facts, record, 110.0, 60.0, 2)
    assert less == msgspec.structs.replace(record, min_warm=2)
    assert begin("chat", "/new", facts, None, 100.0, 60.0, 2) == less
    switched = advance(less, facts, 110.0, 10.0)
    assert switched.state is RolloutState.DRAINING
    assert begin("chat", "/new", facts, switched, 120.0, 60.0, 9) is switched
    # At least one instance has to be warm.
    assert begin_rollout(fleet(instance("c", NEW))).min_warm == 1
    # An undo waits for one only, since it is urgent.
    assert undo("chat", facts, switched, 120.0, 60.0).min_warm == 1
    assert capacity_warning(record, fleet(old_instances[0], instance("c", NEW))) == ""
    assert capacity_warning(record, fleet(*old_instances[:2], instance("c", NEW))) != ""
    assert capacity_warning(switched, facts) == "", "it is too late to warn"


def test_times_of_future_steps_are_zero() -> None:
    record = begin_rollout()
    assert [record.has_model(key) for key in (OLD, NEW, THIRD)] == [True, True, False]
    assert (record.switched_s, record.step_s, record.ended_s, record.reason) == (0.0, 0.0, 0.0, "")
    assert not record.undoes


def test_a_record_is_immutable() -> None:
    record = begin_rollout()
    with pytest.raises(AttributeError):
        record.state = RolloutState.DONE  # type: ignore[misc]
    assert record.state is RolloutState.PREPARING
