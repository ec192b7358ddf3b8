"""Operators' requests about rollouts: begin, undo and forget. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from tailrace.model_identity import covers, fingerprint, text_of
from tailrace.rollout.facts import FleetFacts, FrontEndFacts, list_some
from tailrace.rollout.record import RolloutRecord, RolloutState

# Smallest distance between the beginnings of two rollouts of a name: a double resolves milliseconds since the
# epoch.
_MIN_DISTANCE_S: Final = 0.001
_FINGERPRINT_MIN_LENGTH: Final = 4


class Problem(enum.Enum):
    """The kind of a refusal."""

    UNKNOWN = "unknown"
    AMBIGUOUS = "ambiguous"
    # The request is valid, but not possible in the current state.
    NOT_NOW = "not now"


class RolloutRefused(Exception):
    """Why a rollout cannot begin, in one line."""

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
    """Return the record of a rollout of `model` to the model that `to` names.

    `to`: a fingerprint or its first digits, a key, or the --model of workers. If the present rollout already
    has this target and has not failed, it is returned, with `min_warm` replaced if given while preparing.
    `min_warm`: see RolloutRecord; 0: half as many as there are warm old instances, rounded up.

    Raise RolloutRefused.
    """
    fronts = _serving_front_ends(model, fleet, present)
    new = _target(to, fleet)
    if present is not None and present.new == new and present.state is not RolloutState.FAILED:
        preparing = present.state is RolloutState.PREPARING
        return replace(present, min_warm=min_warm) if min_warm and preparing else present
    if present is not None and present.under_way and not _reverses(present, new):
        end = "wait for its end"
        if not present.undoes:
            end += f", or take it back: tailrace rollout undo {model}"
        raise _not_possible_now(
            f"a rollout of {model} to {fingerprint(present.new)} is under way ({present.state.value}); {end}"
        )
    if present is not None and (not fronts or any(present.steers(front.key) for front in fronts)):
        before = present.in_force
    else:
        # Front ends with another tokenizer have joined since, and use their own model.
        before = _model_in_use(model, new, fronts, fleet)
    if before == new:
        raise _not_possible_now(f"new requests of {model} go to {fingerprint(new)} already")
    _check_tokenizers(new, before, fronts)
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
    """Return the record that undoes the present rollout: new requests go to the previous model again.

    Answers that the new model has begun stay with it. If the present rollout is itself an undo that is in
    progress or done, it is returned: a repeated request must not bring the new model back. Raise
    RolloutRefused.
    """
    if present is None:
        raise RolloutRefused(Problem.UNKNOWN, f"there is no rollout of {model}")
    if present.undoes and present.state is not RolloutState.FAILED:
        return present
    if present.state is RolloutState.FAILED and not present.undoes:
        raise _not_possible_now(
            f"the rollout of {model} to {fingerprint(present.new)} has changed nothing: {present.reason}"
        )
    if present.state is RolloutState.PREPARING:
        return present.failed_because("an operator took it back", now_s)
    fronts = fleet.serving(model)
    if fronts and not any(present.steers(front.key) for front in fronts):
        raise _not_possible_now(f"front ends of {model} have another configuration or tokenizer by now")
    # A failed undo is tried again.
    before, new = (present.before, present.new) if present.undoes else (present.new, present.before)
    if covers(new, before):
        raise _not_possible_now(
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
    """Check that front ends would behave the same without the record. Raise RolloutRefused."""
    if present is None:
        raise RolloutRefused(Problem.UNKNOWN, f"there is no rollout of {model}")
    if present.under_way:
        raise _not_possible_now(f"the rollout of {model} is under way ({present.state.value})")
    takes = fleet.running(present.in_force)
    fronts = [front for front in fleet.serving(model) if present.steers(front.key)]
    others = [
        front.frontend_id
        for front in fronts
        if not (
            covers(front.key, present.in_force) if front.has_weights else any(map(front.would_use, takes))
        )
    ]
    if others:
        raise _not_possible_now(
            f"{list_some(others)}: started with another model than the one that takes new requests "
            f"({fingerprint(present.in_force)}); restart with that one (--model) first"
        )
    strays = sorted(
        instance.instance_id
        for instance in fleet.instances.values()
        if instance not in takes and any(front.would_use(instance) for front in fronts)
    )
    if strays:
        raise _not_possible_now(
            f"{list_some(strays)}: without the record new requests would go there, too; stop first"
        )


def _begun_s(present: RolloutRecord | None, now_s: float) -> float:
    """Return when a rollout that replaces the present one begins: later than it, whatever this scheduler's
    clock says."""
    return now_s if present is None else max(now_s, present.begun_s + _MIN_DISTANCE_S)


def _reverses(present: RolloutRecord, new: str) -> bool:
    """Return whether the present rollout is an undo that has got far enough to be reversed."""
    return present.undoes and present.state is RolloutState.DRAINING and present.before == new


def _serving_front_ends(model: str, fleet: FleetFacts, present: RolloutRecord | None) -> list[FrontEndFacts]:
    fronts = fleet.serving(model)
    if not fronts and present is None:
        names = sorted({front.name for front in fleet.frontends.values()})
        raise RolloutRefused(
            Problem.UNKNOWN, f"no front end serves {model!r}; they serve: {list_some(names) or 'none'}"
        )
    return fronts


def _target(to: str, fleet: FleetFacts) -> str:
    keys = {instance.key for instance in fleet.instances.values()}
    named = {i.key for i in fleet.instances.values() if to in (i.key, i.model)}
    if not named and len(to) >= _FINGERPRINT_MIN_LENGTH:
        named = {key for key in keys if fingerprint(key).startswith(to.lower())}
    if len(named) == 1:
        return named.pop()
    if named:
        raise RolloutRefused(Problem.AMBIGUOUS, f"{to!r} is several models: {_format_models(named, fleet)}")
    raise RolloutRefused(
        Problem.UNKNOWN, f"no instance runs {to!r}; there are: {_format_models(keys, fleet) or 'none'}"
    )


def _model_in_use(model: str, new: str, fronts: Iterable[FrontEndFacts], fleet: FleetFacts) -> str:
    """Return the key of the model that takes new requests while no record decides, as exact as instances
    allow."""
    keys_in_use: set[str] = set()
    for front in fronts:
        keys = {i.key for i in fleet.instances.values() if front.would_use(i)}
        keys_in_use |= keys or ({front.key} if front.has_weights else set())
    models = group_by_weights(keys_in_use)
    if len(models) > 1:
        # An operator has already started front ends of the new model.
        models = [candidate for candidate in models if not candidate.includes(new)]
    match models:
        case [only]:
            # Of two precisions, the one that is not new: instances of the new one take requests as soon as
            # they join.
            return only.without(new).key
        case []:
            raise _not_possible_now(
                f"there is no instance of what serves {model} now, and its front ends have no weights to "
                "tell it by; restart them with the new model"
            )
        case _:
            raise _not_possible_now(
                f"front ends serve several models as {model}: {_format_models(keys_in_use, fleet)}; "
                "stop those of all but one"
            )


def _check_tokenizers(new: str, before: str, fronts: Iterable[FrontEndFacts]) -> None:
    """Check that both models have the front ends' tokenizer."""
    others = sorted(f.frontend_id for f in fronts if text_of(f.key) != text_of(new))
    if text_of(new) == text_of(before) and not others:
        return
    raise _not_possible_now(
        f"{fingerprint(new)} has another configuration or tokenizer than that of "
        f"{list_some(others) or 'what serves now'}; start front ends with it beside these, then stop these "
        "(operations.md, Models)"
    )


def _check_warm(key: str, fleet: FleetFacts) -> None:
    if not fleet.warm(key):
        raise _not_possible_now(fleet.why_not_warm(key))


def _check_adapters(new: str, before: str, fleet: FleetFacts) -> None:
    """Check that requests that name an adapter keep an instance."""
    takes_adapters = any(old.takes_adapters for old in fleet.warm_retiring(before, new))
    if takes_adapters and not any(instance.takes_adapters for instance in fleet.warm(new)):
        raise _not_possible_now(
            f"instances of {fingerprint(before)} take LoRA adapters, "
            f"and no warm one of {fingerprint(new)} does; start one that does (--enable-lora)"
        )


def _not_possible_now(reason: str) -> RolloutRefused:
    return RolloutRefused(Problem.NOT_NOW, reason)


def _format_models(keys: Iterable[str], fleet: FleetFacts) -> str:
    def instances(key: str) -> str:
        return list_some([i.instance_id for i in fleet.running(key)])

    return "; ".join(f"{fingerprint(key)} ({instances(key) or 'no instance'})" for key in sorted(keys))


@dataclass(frozen=True, slots=True)
class SameWeights:
    """Keys of models that differ at most in precision.

    `short` (`text:weights`) covers all precisions of these weights, whatever `keys` are known. A key without
    a precision, as a front end has, is one of `keys` as well.
    """

    short: str
    keys: frozenset[str]

    @property
    def key(self) -> str:
        """Return the key that covers them: the exact one if there is only one, else the short one."""
        return next(iter(self.keys)) if len(self.keys) == 1 else self.short

    def includes(self, key: str) -> bool:
        """Return whether the model of this key has these weights."""
        return covers(self.short, key)

    def without(self, key: str) -> SameWeights:
        """Return the group without `key`, or the same group if that is its only key."""
        return SameWeights(self.short, self.keys - {key} or self.keys)


def group_by_weights(keys: Iterable[str]) -> list[SameWeights]:
    """Return one group for each set of weights, in key order."""
    groups: dict[str, set[str]] = {}
    for key in keys:
        groups.setdefault(":".join(key.split(":")[:2]), set()).add(key)
    return [SameWeights(short, frozenset(groups[short])) for short in sorted(groups)]
