"""What comes next in a rollout, and how far it is, in words. Pure."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from tailrace.model_identity import covers, fingerprint
from tailrace.rollout.facts import FleetFacts, InstanceFacts, first_few
from tailrace.rollout.record import RolloutRecord, RolloutState

STEP_S: Final = 30.0
"""After so long the next old instance drains, too, although the one before is not empty: one long answer
must not hold all of them up. The last one drains when the others are empty."""


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
        return fleet.cold(record.new)
    warm = len(fleet.warm(record.new))
    if warm < record.min_warm:
        return f"{warm} of {record.min_warm} instances of {fingerprint(record.new)} are warm (--min-warm)"
    waiting = sorted(
        front.frontend_id
        for front in fleet.serving(record.model)
        if record.steers(front.key) and not any(covers(record.new, key) for key in front.connected)
    )
    if waiting:
        return f"{first_few(waiting)}: connected to no instance of {fingerprint(record.new)}"
    return ""


def few_warm(record: RolloutRecord, fleet: FleetFacts) -> str:
    """A warning where fewer instances are to take new requests than do now; empty: there are enough."""
    new, old = len(fleet.warm(record.new)), len(fleet.warm_retiring(record.before, record.new))
    if record.state is not RolloutState.PREPARING or new >= old:
        return ""
    return (
        f"{new} warm of {fingerprint(record.new)} are to do what {old} of {fingerprint(record.before)} "
        f"do now; new requests go there once {record.min_warm} are warm (--min-warm)"
    )


def old_instances(record: RolloutRecord, fleet: FleetFacts) -> dict[str, InstanceFacts]:
    """Instances of the model that goes, by id; not those that another name uses."""
    return {
        name: instance
        for name, instance in sorted(fleet.instances.items())
        if instance.key and record.retires(instance.key) and not _shared_by(record, instance, fleet)
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
    olds = [i for i in fleet.instances.values() if i.key and record.retires(i.key)]
    shared = {i.instance_id: users for i in olds if (users := _shared_by(record, i, fleet))}
    names = sorted({name for users in shared.values() for name in users})
    old = fingerprint(record.before)
    return f"{first_few(names)} keeps {first_few(sorted(shared))} of {old}" if shared else ""


def _prepare(record: RolloutRecord, fleet: FleetFacts, now_s: float, waited_s: float) -> RolloutRecord:
    lack = missing(record, fleet)
    if not lack:
        return replace(record, state=RolloutState.DRAINING, switched_s=now_s)
    return record if waited_s < record.prepare_s else record.given_up(lack, now_s)


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
    # The last one is where answers go on whose instance is lost: a draining one hands back.
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
        return f"they are refused: {fleet.cold(record.new)}; tailrace rollout {back}"
    old = old_instances(record, fleet)
    requests = sum(instance.requests for instance in old.values())
    moving = sum(instance.moving for instance in old.values())
    now = [name for name in record.draining if name in old and not old[name].empty]
    later = [name for name in old if name not in record.draining]
    plural = "" if requests == 1 else "s"
    words = f"{requests} request{plural} left on {fingerprint(record.before)}, {moving} moving"
    if now:
        words += f"; draining {first_few(now)}"
    return f"{words}; {len(later)} to drain" if later else words
