"""What operators ask of a rollout: to begin it, to take it back, to forget it. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace

from tailrace.model_identity import covers, fingerprint, text_of
from tailrace.rollout.facts import FleetFacts, FrontEndFacts, first_few
from tailrace.rollout.record import RolloutRecord, RolloutState
from tailrace.rollout.weights import group_by_weights

# Of the beginnings of two rollouts of a name. A double holds a millisecond of seconds since the epoch.
_APART_S: Final = 0.001
_FINGERPRINT_LEAST: Final = 4


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
    if present is not None and (not fronts or any(present.steers(front.key) for front in fronts)):
        before = present.in_force
    else:
        # Front ends with another tokenizer have come since, and go by their own model.
        before = _served(model, new, fronts, fleet)
    if before == new:
        raise _not_now(f"new requests of {model} go to {fingerprint(new)} already")
    _check_texts(new, before, fronts)
    silent = sorted(i.instance_id for i in fleet.instances.values() if not i.key)
    if silent:
        raise _not_now(
            f"{first_few(silent)} does not tell which model it runs (an older version?); restart it"
        )
    _check_warm(new, fleet)
    _check_adapters(new, before, fleet)
    return RolloutRecord(
        model=model,
        before=before,
        new=new,
        state=RolloutState.PREPARING,
        begun_s=_begun_s(present, now_s),
        prepare_s=prepare_s,
        min_warm=min_warm or max(1, (len(fleet.warm_retiring(before, new)) + 1) // 2),
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
        return present.given_up("an operator took it back", now_s)
    fronts = fleet.serving(model)
    if fronts and not any(present.steers(front.key) for front in fronts):
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
    takes = fleet.running(present.in_force)
    fronts = [front for front in fleet.serving(model) if present.steers(front.key)]
    others = [
        front.frontend_id
        for front in fronts
        if not (covers(front.key, present.in_force) if front.has_weights else any(map(front.answers, takes)))
    ]
    if others:
        raise _not_now(
            f"{first_few(others)}: started with another model than the one that takes new requests "
            f"({fingerprint(present.in_force)}); restart with that one (--model) first"
        )
    strays = sorted(
        instance.instance_id
        for instance in fleet.instances.values()
        if instance not in takes and any(front.answers(instance) for front in fronts)
    )
    if strays:
        raise _not_now(
            f"{first_few(strays)}: without the record new requests would go there, too; stop first"
        )


def _begun_s(present: RolloutRecord | None, now_s: float) -> float:
    """When a rollout in place of the present one begins: later, whatever this scheduler's clock says."""
    return now_s if present is None else max(now_s, present.begun_s + _APART_S)


def _reverses(present: RolloutRecord, new: str) -> bool:
    """Whether a rollout that takes another back has gone so far that it can be reversed itself."""
    return present.undoes and present.state is RolloutState.DRAINING and present.before == new


def _fronts(model: str, fleet: FleetFacts, present: RolloutRecord | None) -> list[FrontEndFacts]:
    untold = sorted(front.frontend_id for front in fleet.frontends.values() if not front.name)
    if untold:
        raise _not_now(f"{first_few(untold)} does not tell what it serves (an older version?); restart it")
    fronts = fleet.serving(model)
    if not fronts and present is None:
        names = sorted({front.name for front in fleet.frontends.values()})
        raise RolloutRefused(
            Problem.UNKNOWN, f"no front end serves {model!r}; they serve: {first_few(names) or 'none'}"
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
    models = group_by_weights(found)
    if len(models) > 1:
        # Somebody has begun by hand, with front ends of the new model.
        models = [each for each in models if not each.include(new)]
    match models:
        case [only]:
            # Of two precisions, the other one: instances of the new one take requests as soon as they are
            # there.
            return only.without(new).key
        case []:
            raise _not_now(
                f"there is no instance of what serves {model} now, and its front ends have no weights to "
                "tell it by; restart them with the new model"
            )
        case _:
            raise _not_now(
                f"front ends serve several models as {model}: {_listed(found, fleet)}; "
                "stop those of all but one"
            )


def _check_texts(new: str, before: str, fronts: Iterable[FrontEndFacts]) -> None:
    """A front end's tokenizer must be that of both models."""
    others = sorted(f.frontend_id for f in fronts if text_of(f.key) != text_of(new))
    if text_of(new) == text_of(before) and not others:
        return
    raise _not_now(
        f"{fingerprint(new)} has another configuration or tokenizer than that of "
        f"{first_few(others) or 'what serves now'}; start front ends with it beside these, then stop these "
        "(operations.md, Models)"
    )


def _check_warm(key: str, fleet: FleetFacts) -> None:
    if not fleet.warm(key):
        raise _not_now(fleet.cold(key))


def _check_adapters(new: str, before: str, fleet: FleetFacts) -> None:
    """Requests that name one must not be left without an instance."""
    taken = any(old.takes_adapters for old in fleet.warm_retiring(before, new))
    if taken and not any(instance.takes_adapters for instance in fleet.warm(new)):
        raise _not_now(
            f"instances of {fingerprint(before)} take LoRA adapters, "
            f"and no warm one of {fingerprint(new)} does; start one that does (--engine-arg enable_lora=true)"
        )


def _not_now(reason: str) -> RolloutRefused:
    return RolloutRefused(Problem.NOT_NOW, reason)


def _listed(keys: Iterable[str], fleet: FleetFacts) -> str:
    def instances(key: str) -> str:
        return first_few([i.instance_id for i in fleet.running(key)])

    return "; ".join(f"{fingerprint(key)} ({instances(key) or 'no instance'})" for key in sorted(keys))
