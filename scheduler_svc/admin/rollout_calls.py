"""The admin API's calls about rollouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Final

import grpc

from scheduler_svc.admin.errors import AdminError
from scheduler_svc.rollouts import Rollouts
from scheduler_svc.settings import Settings
from tailrace.model_identity import covers, fingerprint, text_of
from tailrace.rollout.facts import FleetFacts
from tailrace.rollout.progress import capacity_warning, describe
from tailrace.rollout.record import PREPARE_S, RolloutRecord, RolloutState
from tailrace.rollout.requests import Problem, RolloutRefused, begin, check_forgettable, undo
from tailrace.store.membership import Membership
from tailrace.v1 import admin_pb2

_CODES: Final = {
    Problem.UNKNOWN: grpc.StatusCode.NOT_FOUND,
    Problem.AMBIGUOUS: grpc.StatusCode.INVALID_ARGUMENT,
    Problem.NOT_NOW: grpc.StatusCode.FAILED_PRECONDITION,
}
_STATES: Final = {
    RolloutState.PREPARING: admin_pb2.ROLLOUT_STATE_PREPARING,
    RolloutState.DRAINING: admin_pb2.ROLLOUT_STATE_DRAINING,
    RolloutState.DONE: admin_pb2.ROLLOUT_STATE_DONE,
    RolloutState.FAILED: admin_pb2.ROLLOUT_STATE_FAILED,
}
# Seconds between two checks for a watching caller.
_POLL_S: Final = 0.2
_PREPARE_MAX_S: Final = 3_600.0


class RolloutCalls:
    """Implement the calls. All but `models` run on the leader."""

    def __init__(self, rollouts: Rollouts, members: Membership, settings: Settings) -> None:
        self._rollouts = rollouts
        self._members = members
        self._settings = settings

    async def begin(self, request: admin_pb2.RolloutRequest) -> admin_pb2.RolloutInfo:
        """Begin a rollout; one in progress with the same goal stays as it is. Raise AdminError or
        StoreUnavailable."""
        _check("model", request.model)
        _check("to", request.to)
        prepare_s = _prepare_s(request.prepare_s)

        def decide(facts: FleetFacts, present: RolloutRecord | None) -> RolloutRecord:
            return begin(request.model, request.to, facts, present, time.time(), prepare_s, request.min_warm)

        return await self._change(request.model, decide)

    async def undo(self, request: admin_pb2.UndoRolloutRequest) -> admin_pb2.RolloutInfo:
        """Roll the last one back. Raise AdminError or StoreUnavailable."""
        _check("model", request.model)
        prepare_s = _prepare_s(request.prepare_s)

        def decide(facts: FleetFacts, present: RolloutRecord | None) -> RolloutRecord:
            return undo(request.model, facts, present, time.time(), prepare_s)

        return await self._change(request.model, decide)

    async def forget(self, model: str) -> None:
        """Remove a rollout's record. Raise AdminError or StoreUnavailable."""
        _check("model", model)
        present = await self._settings.rollout(model)
        with _refusals():
            check_forgettable(model, self._rollouts.facts(), present)
        await self._settings.swap_rollout(model, present, None)

    async def events(self, request: admin_pb2.WatchRolloutRequest) -> AsyncGenerator[admin_pb2.RolloutEvent]:
        """Yield the progress at each change, the last event when the rollout is over. Raise AdminError."""
        _check("model", request.model)
        sent_record: RolloutRecord | None = None
        sent_message = ""
        while sent_record is None or sent_record.under_way:
            record = self._current_rollout(request, found_before=sent_record is not None)
            if record is not None:
                message = describe(record, self._rollouts.facts())
                if (record, message) != (sent_record, sent_message):
                    sent_record, sent_message = record, message
                    yield admin_pb2.RolloutEvent(rollout=_info(record, message), done=not record.under_way)
                if not record.under_way:
                    return
            await asyncio.sleep(_POLL_S)

    def _current_rollout(
        self, request: admin_pb2.WatchRolloutRequest, found_before: bool
    ) -> RolloutRecord | None:
        """Return the rollout, or None while etcd's watch has not delivered it.

        `found_before`: it has been delivered before. Raise AdminError.
        """
        record = self._members.rollouts.get(request.model)
        if record is None and not request.begun_s:
            raise AdminError(grpc.StatusCode.NOT_FOUND, f"there is no rollout of {request.model}")
        if record is None and found_before:
            raise AdminError(grpc.StatusCode.ABORTED, f"the rollout of {request.model} has been removed")
        # The clocks of two leaders may differ: a rollout of the other one may have begun earlier.
        if record is None or (record.begun_s < request.begun_s and not found_before):
            return None
        if request.begun_s and record.begun_s != request.begun_s:
            raise AdminError(grpc.StatusCode.ABORTED, f"another rollout of {request.model} has begun")
        return record

    def models(self) -> list[admin_pb2.ModelInfo]:
        """Return every name that a front end serves or that has a rollout."""
        facts = self._rollouts.facts()
        names = {front.name for front in facts.frontends.values()}
        rollouts = self._members.rollouts
        return [_model(name, facts, rollouts.get(name)) for name in sorted(names.union(rollouts))]

    async def _change(
        self, model: str, decide: Callable[[FleetFacts, RolloutRecord | None], RolloutRecord]
    ) -> admin_pb2.RolloutInfo:
        """Write what is decided on the present record; `decide` raises RolloutRefused. Raise AdminError or
        StoreUnavailable."""
        with _refusals():
            record = await self._settings.change_rollout(
                model, lambda present: decide(self._rollouts.facts(), present)
            )
        facts = self._rollouts.facts()
        info = _info(record, describe(record, facts))
        info.warning = capacity_warning(record, facts)
        return info


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except RolloutRefused as refused:
        raise AdminError(_CODES[refused.problem], str(refused)) from refused


def _model(name: str, facts: FleetFacts, rollout: RolloutRecord | None) -> admin_pb2.ModelInfo:
    fronts = facts.serving(name)
    takes = {rollout.in_force} if rollout is not None else {front.key for front in fronts}

    def takes_requests(key: str) -> bool:
        return any(covers(model, key) for model in takes)

    keys = {
        instance.key
        for instance in facts.instances.values()
        if instance.key
        and (takes_requests(instance.key) or (rollout is not None and rollout.has_model(instance.key)))
    }
    # Candidates for a rollout: models with the front ends' tokenizer.
    keys |= {
        instance.key
        for instance in facts.instances.values()
        if instance.key and any(text_of(instance.key) == text_of(front.key) for front in fronts)
    }
    exact = sorted(key for key in keys if takes_requests(key))
    return admin_pb2.ModelInfo(
        name=name,
        frontend_ids=sorted(front.frontend_id for front in fronts),
        takes=fingerprint(exact[0]) if len(exact) == 1 else "",
        versions=[
            _version(key, facts, takes_requests(key))
            for key in sorted(keys, key=lambda k: (not takes_requests(k), k))
        ],
        rollout=None if rollout is None else _info(rollout, describe(rollout, facts)),
    )


def _version(key: str, facts: FleetFacts, takes_new: bool) -> admin_pb2.ModelVersion:
    instances = [instance for instance in facts.running(key) if instance.key == key]
    return admin_pb2.ModelVersion(
        fingerprint=fingerprint(key),
        key=key,
        paths=sorted({instance.model for instance in instances}),
        instance_ids=[instance.instance_id for instance in instances],
        warm=sum(not instance.unavailable for instance in instances),
        requests=sum(instance.requests for instance in instances),
        takes_new=takes_new,
    )


def _info(record: RolloutRecord, message: str) -> admin_pb2.RolloutInfo:
    return admin_pb2.RolloutInfo(
        state=_STATES[record.state],
        before=fingerprint(record.before),
        new=fingerprint(record.new),
        message=message,
        draining_instance_ids=record.draining,
        undoes=record.undoes,
        begun_s=record.begun_s,
        switched_s=record.switched_s,
        ended_s=record.ended_s,
        reason=record.reason,
    )


def _check(field: str, value: str) -> None:
    if not value:
        raise AdminError(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: must not be empty")


def _prepare_s(requested_s: float) -> float:
    if not 0 <= requested_s <= _PREPARE_MAX_S:
        raise AdminError(
            grpc.StatusCode.INVALID_ARGUMENT, f"prepare_s: must be from 0 to {_PREPARE_MAX_S:.0f}"
        )
    return requested_s or PREPARE_S
