"""A rolling change of the model behind a served name: its record in etcd, and what comes next. Pure.

One name that users call can be carried by instances of two models at once, as long as both have the same
configuration and tokenizer. The record says which of them takes new requests. A request keeps to the one
that made its first token.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
from msgspec.structs import replace

from tailrace.model_identity import covers, fingerprint, text_of

PREPARE_S: Final = 60.0
"""How long instances and front ends may take, by default, until new requests can go to the new model."""
STEP_S: Final = 30.0
"""After so long the next old instance drains, too, although the one before is not empty: one long answer
must not hold all of them up. The last one drains when the others are empty."""
# Of the beginnings of two rollouts of a name. A double holds a millisecond of seconds since the epoch.
_APART_S: Final = 0.001
_FINGERPRINT_LEAST: Final = 4


class RolloutState(enum.StrEnum):
    """How far it is."""

    # Front ends connect to instances of the new model; new requests go where they went before.
    PREPARING = "preparing"
    # New requests go to the new model; the old instances are emptied one after the other.
    DRAINING = "draining"
    DONE = "done"
    # It was given up while it was prepared: new requests go where they went before.
    FAILED = "failed"


_ORDER: Final = {state: number for number, state in enumerate(RolloutState)}


class RolloutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`rollouts/<served name>`: which model takes new requests of that name, since when and instead of
    which. Keys as in tailrace.model_identity; times are seconds since the epoch, 0: not yet."""

    model: str
    before: str
    new: str
    state: RolloutState
    # Instances of the old model that drain. A worker that comes back under the same name with the new one
    # does not.
    draining: list[str] = []
    # It takes another rollout back.
    undoes: bool = False
    begun_s: float
    # If it is not prepared after so long, it has failed. Each leader measures that from when it first saw it.
    prepare_s: float = PREPARE_S
    # So many instances of the new model must be warm before new requests go there.
    min_warm: int = 1
    switched_s: float = 0.0
    # When the last instance began to drain.
    step_s: float = 0.0
    ended_s: float = 0.0
    # Why it failed.
    reason: str = ""

    @property
    def takes(self) -> str:
        """Key of the model that takes new requests."""
        return self.new if self.state in (RolloutState.DRAINING, RolloutState.DONE) else self.before

    @property
    def step(self) -> tuple[float, RolloutState, float]:
        """Stands for what it waits for now: another one, and the waiting begins anew."""
        return (self.begun_s, self.state, self.step_s)

    @property
    def under_way(self) -> bool:
        """Whether it goes on by itself."""
        return self.state in (RolloutState.PREPARING, RolloutState.DRAINING)

    def newer_than(self, other: RolloutRecord) -> bool:
        """Whether this one, of the same name, was written after the other, as far as it matters to front
        ends. `begin` and `undo` see to it that `begun_s` grows whatever the clocks of schedulers say."""
        return (self.begun_s, _ORDER[self.state]) > (other.begun_s, _ORDER[other.state])

    def concerns(self, key: str) -> bool:
        """Whether this is one of its two models."""
        return covers(self.before, key) or covers(self.new, key)

    def is_old(self, key: str) -> bool:
        """Whether this is the model that goes."""
        return covers(self.before, key) and not covers(self.new, key)

    def governs(self, key: str) -> bool:
        """Whether it says where a front end of this model sends new requests: it can speak to both models."""
        return text_of(key) == text_of(self.new)


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """An instance as it is now."""

    instance_id: str
    # Empty: it does not tell.
    key: str
    # As its worker was told (--model).
    model: str
    # Why it cannot take new requests, whatever a rollout says; empty: it can.
    unavailable: str = ""
    requests: int = 0
    moving: int = 0
    takes_adapters: bool = False
    # It has drained for long enough to know that nothing is on its way there, and has nothing.
    empty: bool = False


@dataclass(frozen=True, slots=True)
class FrontEndFacts:
    """A front end as its record tells."""

    frontend_id: str
    # What users call the model; empty: it does not tell.
    name: str
    # Of the model that it was started with, and the model as it was told (--model).
    key: str
    model: str
    # Keys of the models to whose instances it is connected.
    connected: frozenset[str] = frozenset()

    @property
    def has_weights(self) -> bool:
        """Whether it had weights to look at; else it goes by the name of its model."""
        return ":" in self.key

    def uses(self, instance: InstanceFacts, rollouts: Mapping[str, RolloutRecord]) -> bool:
        """Whether it sends new requests to instances of this model. `rollouts`: all, by name."""
        rollout = rollouts.get(self.name)
        if rollout is None or not rollout.governs(self.key):
            return self.answers(instance)
        return bool(instance.key) and covers(rollout.takes, instance.key)

    def answers(self, instance: InstanceFacts) -> bool:
        """Whether it sends new requests to this instance while no record says where."""
        if not instance.key or not covers(self.key, instance.key):
            return False
        return self.has_weights or instance.model == self.model


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """Everything a rollout goes by."""

    instances: Mapping[str, InstanceFacts]
    frontends: Mapping[str, FrontEndFacts]
    # By the name that users call the model.
    rollouts: Mapping[str, RolloutRecord] = field(default_factory=dict)

    def users(self, instance: InstanceFacts) -> list[str]:
        """Names whose new requests go to this instance's model."""
        fronts = self.frontends.values()
        return sorted({front.name for front in fronts if front.name and front.uses(instance, self.rollouts)})

    def serving(self, model: str) -> list[FrontEndFacts]:
        """Front ends whose users call a model so."""
        return [front for front in self.frontends.values() if front.name == model]

    def running(self, key: str) -> list[InstanceFacts]:
        """Instances of the model, in id order; those that do not tell are none."""
        return [self.instances[name] for name in sorted(self.instances) if self._runs(name, key)]

    def warm(self, key: str) -> list[InstanceFacts]:
        """Those of them that can take requests."""
        return [instance for instance in self.running(key) if not instance.unavailable]

    def _runs(self, name: str, key: str) -> bool:
        found = self.instances[name].key
        return bool(found) and covers(key, found)


class Problem(enum.Enum):
    """What kind of refusal it is."""

    UNKNOWN = "unknown"
    AMBIGUOUS = "ambiguous"
    # Nothing is wrong with what was asked, but it cannot be now.
    NOT_NOW = "not now"


class RolloutRefused(Exception):
    """Why a rollout does not begin, in one line."""

    def __init__(self, problem: Problem, reason: str) -> None:
        super().__init__(reason)
        self.problem = problem


# ---- what an operator asks


def begin(
    model: str,
    to: str,
    fleet: FleetFacts,
    present: RolloutRecord | None,
    now_s: float,
    prepare_s: float,
    min_warm: int = 0,
) -> RolloutRecord:
    """The record of a rollout of `model` to the model that `to` names: a fingerprint or its first digits, a
    key, or what workers were given as --model. The present one if it is just that, and has not failed; with
    `min_warm` instead of its own, where that is given and it is still prepared.

    `min_warm`: see RolloutRecord; 0: half as many as there are warm old ones, rounded up.

    Raises RolloutRefused.
    """
    fronts = _fronts(model, fleet, present)
    new = _target(to, fleet)
    if present is not None and present.new == new and present.state is not RolloutState.FAILED:
        preparing = present.state is RolloutState.PREPARING
        return replace(present, min_warm=min_warm) if min_warm and preparing else present
    if present is not None and present.under_way and not _reverses(present, new):
        end = "wait for its end"
        if not present.undoes:
            end += f", or take it back: tailrace rollout undo {model}"
        raise _not_now(
            f"a rollout of {model} to {fingerprint(present.new)} is under way ({present.state.value}); {end}"
        )
    if present is not None and (not fronts or any(present.governs(front.key) for front in fronts)):
        before = present.takes
    else:
        # Front ends with another tokenizer have come since, and go by their own model.
        before = _served(model, new, fronts, fleet)
    if before == new:
        raise _not_now(f"new requests of {model} go to {fingerprint(new)} already")
    _check_texts(new, before, fronts)
    silent = sorted(i.instance_id for i in fleet.instances.values() if not i.key)
    if silent:
        raise _not_now(f"{_words(silent)} does not tell which model it runs (an older version?); restart it")
    _check_warm(new, fleet)
    _check_adapters(new, before, fleet)
    return RolloutRecord(
        model=model,
        before=before,
        new=new,
        state=RolloutState.PREPARING,
        begun_s=_begun_s(present, now_s),
        prepare_s=prepare_s,
        min_warm=min_warm or max(1, (len(_warm_old(before, new, fleet)) + 1) // 2),
    )


def undo(
    model: str, fleet: FleetFacts, present: RolloutRecord | None, now_s: float, prepare_s: float
) -> RolloutRecord:
    """The record that takes the present rollout back: new requests go where they went before, and what the
    new model has begun it finishes. The present one if that is under way or done: the same again, from a
    second operator or after a lost reply, must not bring the new model back. Raises RolloutRefused."""
    if present is None:
        raise RolloutRefused(Problem.UNKNOWN, f"there is no rollout of {model}")
    if present.undoes and present.state is not RolloutState.FAILED:
        return present
    if present.state is RolloutState.FAILED and not present.undoes:
        raise _not_now(
            f"the rollout of {model} to {fingerprint(present.new)} has changed nothing: {present.reason}"
        )
    if present.state is RolloutState.PREPARING:
        return _failed(present, "an operator took it back", now_s)
    fronts = fleet.serving(model)
    if fronts and not any(present.governs(front.key) for front in fronts):
        raise _not_now(f"front ends of {model} have another configuration or tokenizer by now")
    # One that failed is tried again.
    before, new = (present.before, present.new) if present.undoes else (present.new, present.before)
    if covers(new, before):
        raise _not_now(
            f"new requests of {model} went to several precisions before, {fingerprint(before)} among them; "
            f"name one: tailrace rollout start {model} --to FINGERPRINT"
        )
    _check_warm(new, fleet)
    return RolloutRecord(
        model=model,
        before=before,
        new=new,
        state=RolloutState.PREPARING,
        undoes=True,
        begun_s=_begun_s(present, now_s),
        prepare_s=prepare_s,
    )


def check_forgettable(model: str, fleet: FleetFacts, present: RolloutRecord | None) -> None:
    """Whether front ends would go on as they do without the record. Raises RolloutRefused."""
    if present is None:
        raise RolloutRefused(Problem.UNKNOWN, f"there is no rollout of {model}")
    if present.under_way:
        raise _not_now(f"the rollout of {model} is under way ({present.state.value})")
    takes = fleet.running(present.takes)
    fronts = [front for front in fleet.serving(model) if present.governs(front.key)]
    others = [
        front.frontend_id
        for front in fronts
        if not (covers(front.key, present.takes) if front.has_weights else any(map(front.answers, takes)))
    ]
    if others:
        raise _not_now(
            f"{_words(others)}: started with another model than the one that takes new requests "
            f"({fingerprint(present.takes)}); restart with that one (--model) first"
        )
    strays = sorted(
        instance.instance_id
        for instance in fleet.instances.values()
        if instance not in takes and any(front.answers(instance) for front in fronts)
    )
    if strays:
        raise _not_now(f"{_words(strays)}: without the record new requests would go there, too; stop first")


def _begun_s(present: RolloutRecord | None, now_s: float) -> float:
    """When a rollout in place of the present one begins: later, whatever this scheduler's clock says."""
    return now_s if present is None else max(now_s, present.begun_s + _APART_S)


def _reverses(present: RolloutRecord, new: str) -> bool:
    """Whether a rollout that takes another back has gone so far that it can be reversed itself."""
    return present.undoes and present.state is RolloutState.DRAINING and present.before == new


def _fronts(model: str, fleet: FleetFacts, present: RolloutRecord | None) -> list[FrontEndFacts]:
    untold = sorted(front.frontend_id for front in fleet.frontends.values() if not front.name)
    if untold:
        raise _not_now(f"{_words(untold)} does not tell what it serves (an older version?); restart it")
    fronts = fleet.serving(model)
    if not fronts and present is None:
        names = sorted({front.name for front in fleet.frontends.values()})
        raise RolloutRefused(
            Problem.UNKNOWN, f"no front end serves {model!r}; they serve: {_words(names) or 'none'}"
        )
    return fronts


def _target(to: str, fleet: FleetFacts) -> str:
    keys = {instance.key for instance in fleet.instances.values() if instance.key}
    named = {i.key for i in fleet.instances.values() if i.key and to in (i.key, i.model)}
    if not named and len(to) >= _FINGERPRINT_LEAST:
        named = {key for key in keys if fingerprint(key).startswith(to.lower())}
    if len(named) == 1:
        return named.pop()
    if named:
        raise RolloutRefused(Problem.AMBIGUOUS, f"{to!r} is several models: {_listed(named, fleet)}")
    raise RolloutRefused(
        Problem.UNKNOWN, f"no instance runs {to!r}; there are: {_listed(keys, fleet) or 'none'}"
    )


def _served(model: str, new: str, fronts: Iterable[FrontEndFacts], fleet: FleetFacts) -> str:
    """Key of what takes new requests while no record says so: as exact as the instances allow."""
    found: set[str] = set()
    for front in fronts:
        keys = {i.key for i in fleet.instances.values() if front.answers(i)}
        found |= keys or ({front.key} if front.has_weights else set())
    by_weights: dict[str, set[str]] = {}
    for key in found:
        by_weights.setdefault(":".join(key.split(":")[:2]), set()).add(key)
    if len(by_weights) > 1:
        # Somebody has begun by hand, with front ends of the new model.
        by_weights = {short: keys for short, keys in by_weights.items() if not covers(short, new)}
    if len(by_weights) == 1:
        short, keys = by_weights.popitem()
        # Of two precisions, the other one: instances of the new one take requests as soon as they are there.
        keys = keys - {new} or keys
        return keys.pop() if len(keys) == 1 else short
    if not by_weights:
        raise _not_now(
            f"there is no instance of what serves {model} now, and its front ends have no weights to tell it "
            "by; restart them with the new model"
        )
    raise _not_now(
        f"front ends serve several models as {model}: {_listed(found, fleet)}; stop those of all but one"
    )


def _check_texts(new: str, before: str, fronts: Iterable[FrontEndFacts]) -> None:
    """A front end's tokenizer must be that of both models."""
    others = sorted(f.frontend_id for f in fronts if text_of(f.key) != text_of(new))
    if text_of(new) == text_of(before) and not others:
        return
    raise _not_now(
        f"{fingerprint(new)} has another configuration or tokenizer than that of "
        f"{_words(others) or 'what serves now'}; start front ends with it beside these, then stop these "
        "(operations.md, Models)"
    )


def _check_warm(key: str, fleet: FleetFacts) -> None:
    if not fleet.warm(key):
        raise _not_now(_cold(key, fleet))


def _warm_old(before: str, new: str, fleet: FleetFacts) -> list[InstanceFacts]:
    """Instances that can take requests, of the model that goes; of two precisions of its weights, of that."""
    return [instance for instance in fleet.warm(before) if not covers(new, instance.key)]


def few_warm(record: RolloutRecord, fleet: FleetFacts) -> str:
    """A warning where fewer instances are to take new requests than do now; empty: there are enough."""
    new, old = len(fleet.warm(record.new)), len(_warm_old(record.before, record.new, fleet))
    if record.state is not RolloutState.PREPARING or new >= old:
        return ""
    return (
        f"{new} warm of {fingerprint(record.new)} are to do what {old} of {fingerprint(record.before)} "
        f"do now; new requests go there once {record.min_warm} are warm (--min-warm)"
    )


def _check_adapters(new: str, before: str, fleet: FleetFacts) -> None:
    """Requests that name one must not be left without an instance."""
    taken = any(old.takes_adapters for old in _warm_old(before, new, fleet))
    if taken and not any(instance.takes_adapters for instance in fleet.warm(new)):
        raise _not_now(
            f"instances of {fingerprint(before)} take LoRA adapters, "
            f"and no warm one of {fingerprint(new)} does; start one that does (--engine-arg enable_lora=true)"
        )


def _cold(key: str, fleet: FleetFacts) -> str:
    reasons = [f"{i.instance_id} {i.unavailable}" for i in fleet.running(key)]
    return f"no instance of {fingerprint(key)} is warm: {', '.join(reasons) or 'there is none'}"


def _not_now(reason: str) -> RolloutRefused:
    return RolloutRefused(Problem.NOT_NOW, reason)


def _listed(keys: Iterable[str], fleet: FleetFacts) -> str:
    def instances(key: str) -> str:
        return _words([i.instance_id for i in fleet.running(key)])

    return "; ".join(f"{fingerprint(key)} ({instances(key) or 'no instance'})" for key in sorted(keys))


def _words(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


# ---- what comes next


def advance(record: RolloutRecord, fleet: FleetFacts, now_s: float, waited_s: float) -> RolloutRecord:
    """The record after the next step; the same one while there is none.

    `now_s`: seconds since the epoch, which is only written down. `waited_s`: since this leader first saw the
    present `step`, by a clock that nobody sets: clocks of two leaders may differ.
    """
    match record.state:
        case RolloutState.PREPARING:
            return _prepare(record, fleet, now_s, waited_s)
        case RolloutState.DRAINING:
            return _drain(record, fleet, now_s, waited_s)
        case _:
            return record


def missing(record: RolloutRecord, fleet: FleetFacts) -> str:
    """What keeps new requests from going to the new model; empty: nothing."""
    if not fleet.warm(record.new):
        return _cold(record.new, fleet)
    warm = len(fleet.warm(record.new))
    if warm < record.min_warm:
        return f"{warm} of {record.min_warm} instances of {fingerprint(record.new)} are warm (--min-warm)"
    waiting = sorted(
        front.frontend_id
        for front in fleet.serving(record.model)
        if record.governs(front.key) and not any(covers(record.new, key) for key in front.connected)
    )
    if waiting:
        return f"{_words(waiting)}: connected to no instance of {fingerprint(record.new)}"
    return ""


def old_instances(record: RolloutRecord, fleet: FleetFacts) -> dict[str, InstanceFacts]:
    """Instances of the model that goes, by id; not those that another name uses."""
    return {
        name: instance
        for name, instance in sorted(fleet.instances.items())
        if instance.key and record.is_old(instance.key) and not _shared_by(record, instance, fleet)
    }


def _shared_by(record: RolloutRecord, instance: InstanceFacts, fleet: FleetFacts) -> list[str]:
    return [name for name in fleet.users(instance) if name != record.model]


def describe(record: RolloutRecord, fleet: FleetFacts) -> str:
    """How far it is, in one line."""
    new, before = fingerprint(record.new), fingerprint(record.before)
    match record.state:
        case RolloutState.PREPARING:
            lack = missing(record, fleet)
            return f"preparing: {lack}" if lack else f"prepared: new requests are about to go to {new}"
        case RolloutState.DRAINING:
            return f"new requests go to {new}; {_draining_words(record, fleet)}"
        case RolloutState.DONE:
            again = " again" if record.undoes else ""
            stay = _staying(record, fleet)
            return f"done: new requests go to {new}{again}, and {stay or f'no request of {before} is left'}"
        case RolloutState.FAILED:
            return f"given up: {record.reason}; new requests go to {before} as before"


def _staying(record: RolloutRecord, fleet: FleetFacts) -> str:
    """Instances of the old model that another name uses, in words; empty: there are none."""
    olds = [i for i in fleet.instances.values() if i.key and record.is_old(i.key)]
    shared = {i.instance_id: users for i in olds if (users := _shared_by(record, i, fleet))}
    names = sorted({name for users in shared.values() for name in users})
    old = fingerprint(record.before)
    return f"{_words(names)} keeps {_words(sorted(shared))} of {old}" if shared else ""


def _prepare(record: RolloutRecord, fleet: FleetFacts, now_s: float, waited_s: float) -> RolloutRecord:
    lack = missing(record, fleet)
    if not lack:
        return replace(record, state=RolloutState.DRAINING, switched_s=now_s)
    return record if waited_s < record.prepare_s else _failed(record, lack, now_s)


def _failed(record: RolloutRecord, reason: str, now_s: float) -> RolloutRecord:
    return replace(record, state=RolloutState.FAILED, reason=reason, ended_s=now_s)


def _drain(record: RolloutRecord, fleet: FleetFacts, now_s: float, waited_s: float) -> RolloutRecord:
    old = old_instances(record, fleet)
    draining = [name for name in record.draining if name in old]
    left = {name: instance for name, instance in old.items() if name not in draining}
    waits = any(not old[name].empty for name in draining)
    if not left:
        if waits:
            return replace(record, draining=draining)
        return replace(record, draining=draining, state=RolloutState.DONE, ended_s=now_s)
    # Without the new model there is nobody for what old instances hand back, and it may have to be undone.
    # The last one is where answers go on whose instance is lost: a draining one takes none.
    if not fleet.warm(record.new) or (waits and (len(left) == 1 or waited_s < STEP_S)):
        return replace(record, draining=draining)
    following = min(left.values(), key=lambda instance: (instance.requests, instance.instance_id))
    return replace(record, draining=[*draining, following.instance_id], step_s=now_s)


def _draining_words(record: RolloutRecord, fleet: FleetFacts) -> str:
    if not fleet.warm(record.new):
        back = (
            f"start {record.model} --to {fingerprint(record.before)}"
            if record.undoes
            else f"undo {record.model}"
        )
        return f"they are refused: {_cold(record.new, fleet)}; tailrace rollout {back}"
    old = old_instances(record, fleet)
    requests = sum(instance.requests for instance in old.values())
    moving = sum(instance.moving for instance in old.values())
    now = [name for name in record.draining if name in old and not old[name].empty]
    later = [name for name in old if name not in record.draining]
    plural = "" if requests == 1 else "s"
    words = f"{requests} request{plural} left on {fingerprint(record.before)}, {moving} moving"
    if now:
        words += f"; draining {_words(now)}"
    return f"{words}; {len(later)} to drain" if later else words
