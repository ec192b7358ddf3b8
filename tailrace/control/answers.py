"""Check what a policy returned, and when: types, ranges, and names that the policy was shown.

The package may be third-party, and return anything. What passes is made of exact types alone, so nothing of
the policy's own code runs when it is used.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import islice
from typing import Final, TypeAlias

from tailrace.actions import (
    Action,
    CopyPrefix,
    Migrate,
    Offer,
    Place,
    Placement,
    Refuse,
    ReturnPrompts,
    SetPool,
    SetStages,
)
from tailrace.cluster import Arrival, ClusterView, InstanceState, Pool, RequestView, Stage, StagesError
from tailrace.cluster import check_stages as check_stage_ranges
from tailrace.policy.requests import table_of

Answer: TypeAlias = Placement | Sequence[Action] | None
"""What a policy answers to a question; None: it failed."""

ACTIONS_MAX: Final = 10_000
"""Most actions of one decision; the scheduler carries out far fewer at a time."""

# Characters of an id or a reason.
_FIELD_MAX: Final = 1_000
# Of a text that is shown.
_TEXT_MAX: Final = 300
# Of one action, such as all prompts that wait on an instance.
_IDS_MAX: Final = 100_000
# What fits into every message.
_INTEGER_MAX: Final = 2**63 - 1


class BadAnswer(Exception):
    """A policy raised, or returned something else than was asked for; the message says what, in one line."""


def may_place(view: ClusterView, arrival: Arrival, instance_id: str) -> bool:
    """Return whether the arrival may go to this instance."""
    instance = view.instances.get(instance_id)
    return (
        instance is not None
        and instance.state is InstanceState.ACTIVE
        and instance_id not in arrival.excluded
    )


def checked_placement(view: ClusterView, arrival: Arrival, answer: object) -> Placement:
    """Return the placement that a policy returned. Raise BadAnswer."""
    if type(answer) is Place:
        if type(answer.instance_id) is not str or not may_place(view, arrival, answer.instance_id):
            raise BadAnswer(f"instance_id: {_shown(answer.instance_id)} may not get this request")
        # The type first: an object of a policy's could run its code when it is compared.
        if type(answer.pull_from) is not str or answer.pull_from:
            _check_instance(view, "pull_from", answer.pull_from)
        if type(answer.also) is tuple and not answer.also:
            return answer
        return Place(answer.instance_id, checked_actions(view, None, answer.also), answer.pull_from)
    if type(answer) is Refuse:
        _check_reason(answer.reason)
        if type(answer.final) is not bool:
            raise BadAnswer(f"final: {_kind(answer.final)} is not true or false")
        return answer
    _discard(answer)
    raise BadAnswer(f"returned {_kind(answer)} instead of Place or Refuse")


def checked_actions(view: ClusterView, request: RequestView | None, answer: object) -> tuple[Action, ...]:
    """Return the actions that a policy returned for this request (None: for none), all of them made.

    Raise BadAnswer, or what iterating raises.
    """
    if type(answer) is tuple and not answer:
        return ()
    if isinstance(answer, (str, bytes)) or not isinstance(answer, Iterable):
        _discard(answer)
        raise BadAnswer(f"returned {_kind(answer)} instead of a sequence of actions")
    actions = tuple(islice(answer, ACTIONS_MAX + 1))
    if len(actions) > ACTIONS_MAX:
        raise BadAnswer(f"returned more than {ACTIONS_MAX:,} actions")
    requests = _Requests(view, request)
    for number, action in enumerate(actions):
        try:
            _check_action(view, requests, action)
        except BadAnswer as error:
            raise BadAnswer(f"action {number}, {_kind(action)}: {error}") from error
    return actions


class _Requests:
    """The requests that the policy was shown, by instance."""

    def __init__(self, view: ClusterView, asked: RequestView | None) -> None:
        self._view = view
        self._asked = asked
        self._ids: dict[str, frozenset[str]] = {}

    def check(self, request_id: object, instance_id: object) -> None:
        """Raise BadAnswer unless the instance has this request."""
        _check_instance(self._view, "source_id", instance_id)
        assert isinstance(instance_id, str)
        if type(request_id) is not str:
            raise BadAnswer(f"request_id: {_shown(request_id)} is not a request on {instance_id}")
        asked = self._asked
        if asked is not None and (request_id, instance_id) == (asked.request_id, asked.instance_id):
            return
        ids = self._ids.get(instance_id)
        if ids is None:
            # Without the views of the requests: those of all sources of a tick take tens of milliseconds.
            requests = table_of(self._view.instances[instance_id].requests)
            ids = self._ids[instance_id] = frozenset(requests.ids)
        if request_id not in ids:
            raise BadAnswer(f"request_id: {_shown(request_id)} is not a request on {instance_id}")


def _check_action(view: ClusterView, requests: _Requests, action: object) -> None:
    # By exact type: a subclass could run code when it is used.
    kind = type(action)
    if kind is Migrate:
        assert isinstance(action, Migrate)
        requests.check(action.request_id, action.source_id)
        _check_instance(view, "target_id", action.target_id)
        _check_reason(action.reason)
    elif kind is Offer:
        assert isinstance(action, Offer)
        requests.check(action.request_id, action.source_id)
        _check_strings("receiver_ids", action.receiver_ids)
        if not action.receiver_ids:
            raise BadAnswer("receiver_ids: must not be empty")
        for receiver_id in action.receiver_ids:
            _check_instance(view, "receiver_ids", receiver_id)
        if action.most_tokens is not None:
            _check_integer("most_tokens", action.most_tokens)
        _check_reason(action.reason)
    elif kind is ReturnPrompts:
        assert isinstance(action, ReturnPrompts)
        _check_instance(view, "instance_id", action.instance_id)
        # Which of them still wait there, its worker knows.
        _check_strings("request_ids", action.request_ids)
    elif kind is CopyPrefix:
        assert isinstance(action, CopyPrefix)
        _check_instance(view, "holder_id", action.holder_id)
        _check_instance(view, "target_id", action.target_id)
        # Not necessarily in the view: the arrivals of hot prefixes are remembered for longer.
        _check_strings("request_id", (action.request_id,))
        _check_integer("tokens", action.tokens)
        _check_reason(action.reason)
    elif kind is SetPool:
        assert isinstance(action, SetPool)
        _check_instance(view, "instance_id", action.instance_id)
        if action.pool is not None and type(action.pool) is not Pool:
            raise BadAnswer(f"pool: {_kind(action.pool)} is not a Pool or None")
    elif kind is SetStages:
        assert isinstance(action, SetStages)
        _check_stages(action.stages, view.instances)
    else:
        raise BadAnswer("is not an action")


def _check_stages(stages: object, instances: Container[str]) -> None:
    if type(stages) is not tuple:
        raise BadAnswer(f"stages: {_kind(stages)} is not a tuple of Stage")
    for number, stage in enumerate(stages):
        if type(stage) is not Stage:
            raise BadAnswer(f"stages[{number}]: {_kind(stage)} is not a Stage")
        _check_integer(f"stages[{number}].lo", stage.lo)
        _check_integer(f"stages[{number}].hi", stage.hi)
        _check_strings(f"stages[{number}].instance_ids", stage.instance_ids)
    try:
        check_stage_ranges(stages, instances)
    except StagesError as error:
        raise BadAnswer(str(error)) from error


def _check_instance(view: ClusterView, field: str, value: object) -> None:
    if type(value) is not str or value not in view.instances:
        raise BadAnswer(f"{field}: {_shown(value)} is not an instance in the view")


def _check_strings(field: str, values: object) -> None:
    if type(values) is not tuple:
        raise BadAnswer(f"{field}: {_kind(values)} is not a tuple of str")
    if len(values) > _IDS_MAX:
        raise BadAnswer(f"{field}: has more than {_IDS_MAX:,}")
    for value in values:
        if type(value) is not str:
            raise BadAnswer(f"{field}: {_kind(value)} is not a str")
        if len(value) > _FIELD_MAX:
            raise BadAnswer(f"{field}: one has more than {_FIELD_MAX:,} characters")
        _check_text(field, value)


def _check_reason(value: object) -> None:
    if type(value) is not str:
        raise BadAnswer(f"reason: {_kind(value)} is not a str")
    if len(value) > _FIELD_MAX:
        raise BadAnswer(f"reason: has more than {_FIELD_MAX:,} characters")
    _check_text("reason", value)
    if not value.isprintable():
        # It goes to logs and terminals.
        raise BadAnswer(f"reason: {_shown(value)} has characters that are not printable")


def _check_text(field: str, value: str) -> None:
    if value.isascii():
        return
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadAnswer(f"{field}: {_shown(value)} is not valid Unicode") from None


def _check_integer(field: str, value: object) -> None:
    if type(value) is not int or not 0 <= value <= _INTEGER_MAX:
        raise BadAnswer(f"{field}: {_shown(value)} is not an integer of at least 0")


def _kind(value: object) -> str:
    return type(value).__name__


def _shown(value: object) -> str:
    """Return a string as written in Python, and of anything else its type: its text may be anything."""
    return ascii(value[:_TEXT_MAX]) if type(value) is str else _kind(value)


def _discard(answer: object) -> None:
    """Close a coroutine or generator that was returned by mistake, so that Python does not warn of it."""
    close = getattr(answer, "close", None)
    if callable(close) and type(answer).__name__ in ("coroutine", "generator"):
        close()
