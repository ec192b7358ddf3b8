"""Advance rollouts and describe their progress. Pure."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from tailrace.model_identity import covers, fingerprint
from tailrace.rollout.facts import FleetFacts, InstanceFacts, list_some
from tailrace.rollout.record import RolloutRecord, RolloutState

STEP_S: Final = 30.0
"""Seconds after which the next old instance drains although the previous one is not empty, so that one long
answer does not delay all of them. The last one drains once the others are empty."""


def advance(record: RolloutRecord, fleet: FleetFacts, now_s: float, step_duration_s: float) -> RolloutRecord:
    """Return the record after the next step; the same one if there is none yet.

    `now_s`: seconds since the epoch, only recorded. `step_duration_s`: since this leader first saw the
    current `step`, by a monotonic clock, because the clocks of two leaders may differ.
    """
    match record.state:
        case RolloutState.PREPARING:
            return _prepare(record, fleet, now_s, step_duration_s)
        case RolloutState.DRAINING:
            return _drain(record, fleet, now_s, step_duration_s)
        case _:
            return record


def unmet_condition(record: RolloutRecord, fleet: FleetFacts) -> str:
    """Return why new requests cannot go to the new model yet; empty if they can."""
    if not fleet.warm(record.new):
        return fleet.why_not_warm(record.new)
    warm = len(fleet.warm(record.new))
    if warm < record.min_warm:
        return f"{warm} of {record.min_warm} instances of {fingerprint(record.new)} are warm (--min-warm)"
    waiting = sorted(
        front.frontend_id
        for front in fleet.serving(record.model)
        if record.steers(front.key) and not any(covers(record.new, key) for key in front.connected)
    )
    if waiting:
        return f"{list_some(waiting)}: connected to no instance of {fingerprint(record.new)}"
    return ""


def capacity_warning(record: RolloutRecord, fleet: FleetFacts) -> str:
    """Return a warning if fewer instances will take new requests than do now; empty otherwise."""
    new, old = len(fleet.warm(record.new)), len(fleet.warm_retiring(record.before, record.new))
    if record.state is not RolloutState.PREPARING or new >= old:
        return ""
    return (
        f"{new} warm of {fingerprint(record.new)} will replace {old} of {fingerprint(record.before)}; new "
        f"requests go there once {record.min_warm} are warm (--min-warm)"
    )


def old_instances(record: RolloutRecord, fleet: FleetFacts) -> dict[str, InstanceFacts]:
    """Return instances of the retiring model by id, without those that another public name uses."""
    return {
        name: instance
        for name, instance in sorted(fleet.instances.items())
        if instance.key and record.retires(instance.key) and not _shared_by(record, instance, fleet)
    }


def _shared_by(record: RolloutRecord, instance: InstanceFacts, fleet: FleetFacts) -> list[str]:
    return [name for name in fleet.names_using(instance) if name != record.model]


def describe(record: RolloutRecord, fleet: FleetFacts) -> str:
    """Return the progress in one line."""
    new, before = fingerprint(record.new), fingerprint(record.before)
    match record.state:
        case RolloutState.PREPARING:
            unmet = unmet_condition(record, fleet)
            return f"preparing: {unmet}" if unmet else f"prepared: new requests are about to go to {new}"
        case RolloutState.DRAINING:
            return f"new requests go to {new}; {_describe_draining(record, fleet)}"
        case RolloutState.DONE:
            again = " again" if record.undoes else ""
            stay = _describe_shared(record, fleet)
            return f"done: new requests go to {new}{again}, and {stay or f'no request of {before} is left'}"
        case RolloutState.FAILED:
            return f"failed: {record.reason}; new requests still go to {before}"


def _describe_shared(record: RolloutRecord, fleet: FleetFacts) -> str:
    """Describe instances of the old model that another public name uses; empty if there are none."""
    olds = [i for i in fleet.instances.values() if i.key and record.retires(i.key)]
    shared = {i.instance_id: users for i in olds if (users := _shared_by(record, i, fleet))}
    names = sorted({name for users in shared.values() for name in users})
    old = fingerprint(record.before)
    return f"{list_some(names)} keeps {list_some(sorted(shared))} of {old}" if shared else ""


def _prepare(record: RolloutRecord, fleet: FleetFacts, now_s: float, step_duration_s: float) -> RolloutRecord:
    unmet = unmet_condition(record, fleet)
    if not unmet:
        return replace(record, state=RolloutState.DRAINING, switched_s=now_s)
    return record if step_duration_s < record.prepare_s else record.failed_because(unmet, now_s)


def _drain(record: RolloutRecord, fleet: FleetFacts, now_s: float, step_duration_s: float) -> RolloutRecord:
    old = old_instances(record, fleet)
    draining = [name for name in record.draining if name in old]
    left = {name: instance for name, instance in old.items() if name not in draining}
    waiting = any(not old[name].empty for name in draining)
    if not left:
        if waiting:
            return replace(record, draining=draining)
        return replace(record, draining=draining, state=RolloutState.DONE, ended_s=now_s)
    # While the new model is not warm, no instance can take over requests, and an undo may be needed. The
    # last old instance continues answers whose instance is lost; a draining one hands its requests back.
    if not fleet.warm(record.new) or (waiting and (len(left) == 1 or step_duration_s < STEP_S)):
        return replace(record, draining=draining)
    following = min(left.values(), key=lambda instance: (instance.requests, instance.instance_id))
    return replace(record, draining=[*draining, following.instance_id], step_s=now_s)


def _describe_draining(record: RolloutRecord, fleet: FleetFacts) -> str:
    if not fleet.warm(record.new):
        back = (
            f"start {record.model} --to {fingerprint(record.before)}"
            if record.undoes
            else f"undo {record.model}"
        )
        return f"they are refused: {fleet.why_not_warm(record.new)}; tailrace rollout {back}"
    old = old_instances(record, fleet)
    requests = sum(instance.requests for instance in old.values())
    moving = sum(instance.moving for instance in old.values())
    now = [name for name in record.draining if name in old and not old[name].empty]
    later = [name for name in old if name not in record.draining]
    plural = "" if requests == 1 else "s"
    text = f"{requests} request{plural} left on {fingerprint(record.before)}, {moving} moving"
    if now:
        text += f"; draining {list_some(now)}"
    return f"{text}; {len(later)} to drain" if later else text
