"""Find policies by name. A user's package adds one with the entry point group `tailrace.policies`.

Wherever a policy is named, it is `NAME[+ORDER] [KEY=VALUE ...]`: placement and moves are the policy's, and so
is the order in which each instance serves its requests unless another one is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Final, TypeGuard

from tailrace.actions import WhenFull
from tailrace.bounded import shown
from tailrace.intra.registry import UnknownIntraError, intra_names, intra_parameters
from tailrace.plugins import PluginError, describe_error, load_plugin, plugins, wrong_declaration
from tailrace.policy.base import Policy
from tailrace.policy.deployment import Deployment, Fact
from tailrace.policy.parameters import (
    NO_PARAMETERS,
    Parameter,
    ParameterError,
    Value,
    parse_parameters,
    read_assignments,
)
from tailrace.slo import Slo
from tailrace.suggestion import did_you_mean

GROUP = "tailrace.policies"

MOVES: Final = Parameter(
    True,
    "whether requests are moved once they are placed, such as when a phase ends, or to rebalance",
    name="moves",
)
"""Parameter of every policy that moves requests."""

# Ablations and baselines that once had names of their own, and what to write.
FORMER: Final = {
    "ares_no_prediction": "ares rescheduling=current_load",
    "cascade_chain": "cascade layout=chain",
    "cascade_inter_stage_only": "cascade rebalance=false",
    "cascade_memory": "cascade boundaries=memory",
    "cascade_no_pipeline": "cascade layout=one_stage",
    "cascade_quantity": "cascade boundaries=quantity",
    "cascade_round_robin": "cascade handover=round_robin rebalance=false",
    "current_load": "ares rescheduling=off",
    "fcfs": "least_loaded+fcfs load=footprint",
    "min_kv": "least_loaded load=footprint",
    "minimal_load": "static_pools",
    "pascal_no_migration": "pascal migration=never",
    "pascal_non_adaptive": "pascal migration=always",
    "round_robin_pools": "static_pools dispatch=round_robin",
    "rr": "least_loaded+round_robin load=footprint",
}


class UnknownPolicyError(ValueError):
    """No policy of that name is installed."""


class UnusablePolicyError(RuntimeError):
    """A policy of that name is installed but cannot be created; the message says why."""


def names() -> list[str]:
    """Return the name of every installed policy, sorted."""
    return sorted(plugins(GROUP))


def load(name: str, *, parameters: Mapping[str, Value] = NO_PARAMETERS, slo: Slo | None = None) -> Policy:
    """Create the policy called `name`, planning for `slo`.

    `parameters` may include those of the policy's batch order; they are checked, and are used by the workers.
    Raise UnknownPolicyError with the known names, UnusablePolicyError if its package fails, or ParameterError
    for parameters that it does not accept.
    """
    deployment = Deployment() if slo is None else Deployment(slo)
    choice = choose(name)
    merged = {**choice.parameters, **parameters}
    return make_policy(name, choice.policy, choice.order, merged, deployment)


# Of policies that were created, or are being created.
_problems: dict[EntryPoint, str] = {}


def problem_of(name: str) -> str:
    """Return why the policy called `name` cannot be used, as `load_all` has found out; empty: it can."""
    point = plugins(GROUP).get(name)
    if point is None:
        return f"unknown policy {name!r}"
    return _problems.get(point, _being_loaded(name))


def _being_loaded(name: str) -> str:
    return f"policy {name!r} is still being loaded"


def load_all() -> None:
    """Create each installed policy once; `problem_of` then knows why one cannot be used.

    For a thread: an import or a constructor may take long. One that never returns stops the thread that asked
    first.
    """
    for name, point in sorted(plugins(GROUP).items()):
        if point in _problems:
            continue
        _problems[point] = _being_loaded(name)
        try:
            load(name)
        except (UnknownPolicyError, UnusablePolicyError, ParameterError) as error:
            _problems[point] = str(error)
        else:
            _problems[point] = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a policy's name in full stands for: where requests go, in which order an instance serves them, and
    parameters of both."""

    policy: type[Policy]
    # A name of `tailrace.intra.registry`.
    order: str
    parameters: Mapping[str, Value]


def parts_of(text: str) -> tuple[str, str, list[str]]:
    """Return NAME, ORDER (empty: the policy's own) and each KEY=VALUE of a policy's name in full."""
    words = text.split() or [""]
    name, _, order = words[0].partition("+")
    return name, order, words[1:]


def choose(text: str) -> Choice:
    """Return what `NAME[+ORDER] [KEY=VALUE ...]` stands for.

    ORDER replaces the batch order that belongs to the policy. Raise UnknownPolicyError, UnusablePolicyError
    or ParameterError.
    """
    name, order, assignments = parts_of(text)
    return chosen(text, policy_class(name), order, assignments)


def chosen(text: str, kind: type[Policy], order: str, assignments: Iterable[str]) -> Choice:
    """Return the choice of this policy that `text` names: `order` is empty for the policy's own.

    Raise UnknownPolicyError, UnusablePolicyError or ParameterError.
    """
    if order and order not in intra_names():
        meant = did_you_mean(order, intra_names())
        raise UnknownPolicyError(
            f"{shown(text)}: unknown order {shown(order)}{meant}; known: {', '.join(intra_names())}"
        )
    order = order or kind.batch_order
    given = read_assignments(assignments)
    values = parse_parameters(f"policy {shown(text)}", declared_parameters(kind, order), given)
    return Choice(kind, order, {name: values[name] for name in given})


def policy_class(name: str) -> type[Policy]:
    """Return the installed policy of that name. Raise UnknownPolicyError or UnusablePolicyError."""
    if name not in plugins(GROUP):
        # It may have been installed since.
        plugins.cache_clear()
    point = plugins(GROUP).get(name)
    if point is None:
        if name in FORMER:
            raise UnknownPolicyError(former(name, FORMER[name]))
        if ":" in name:
            raise UnknownPolicyError(
                f"policy {shown(name)}: only simulations take module:Class; elsewhere it needs an entry "
                "point (docs/adding-a-policy.md, Register it)"
            )
        installed = names()
        meant = did_you_mean(name, installed)
        raise UnknownPolicyError(f"unknown policy {shown(name)}{meant}; installed: {', '.join(installed)}")
    try:
        kind = load_plugin(point)
    except PluginError as error:
        raise UnusablePolicyError(f"policy {name!r} {error}") from error
    if not _is_policy(kind):
        raise UnusablePolicyError(f"policy {name!r} ({point.value}) is not a tailrace.policy.base.Policy")
    if wrong := wrong_declaration(kind, {"parameters": Parameter, "needs": Fact}, ("batch_order", "summary")):
        raise UnusablePolicyError(f"policy {name!r} ({point.value}): {wrong}")
    return kind


def former(name: str, written: str) -> str:
    """Return what to tell whoever writes a former name."""
    return f"there is no policy {name!r} any more; write {written!r}"


def _is_policy(plugin: object) -> TypeGuard[type[Policy]]:
    return isinstance(plugin, type) and issubclass(plugin, Policy)


def declared_parameters(kind: type[Policy], order: str) -> tuple[Parameter, ...]:
    """Return what users may set of a policy: its own parameters, `moves` if it moves requests, and other ones
    of its batch order.

    Raise UnusablePolicyError if the order is not installed.
    """
    own = {parameter.name: parameter for parameter in kind.parameters}
    if _moves(kind):
        own.setdefault(MOVES.name, MOVES)
    try:
        of_order = intra_parameters(order)
    except UnknownIntraError as error:
        raise UnusablePolicyError(f"{kind.__qualname__}: batch_order: {error}") from error
    return (*own.values(), *(p for p in of_order if p.name not in own))


def _moves(kind: type[Policy]) -> bool:
    """Return whether the policy may move requests: all but `place` is there for that."""
    points = (Policy.on_prefill_done, Policy.on_reasoning_ended, Policy.on_length_boundary, Policy.on_tick)
    return any(getattr(kind, point.__name__) is not point for point in points)


def all_parameters(name: str, parameters: Mapping[str, Value]) -> dict[str, Value]:
    """Return every parameter of a policy and its batch order with its value: the given one, else the default.

    Raise UnknownPolicyError, UnusablePolicyError or ParameterError.
    """
    choice = choose(name)
    declared = declared_parameters(choice.policy, choice.order)
    return parse_parameters(f"policy {name!r}", declared, {**choice.parameters, **parameters})


def make_policy(
    name: str, kind: type[Policy], order: str, parameters: Mapping[str, Value], deployment: Deployment
) -> Policy:
    """Create an instance of `kind`, which users know as `name`, with the batch order `order`.

    Raise UnusablePolicyError or ParameterError.
    """
    values = parse_parameters(f"policy {name!r}", declared_parameters(kind, order), parameters)
    own_values = {parameter.name: values[parameter.name] for parameter in kind.parameters}
    try:
        policy = kind(**own_values, **deployment.facts(kind.needs))
        if not values.get(MOVES.name, True):
            policy.moves = False
    # The package may be third-party, and raise anything, SystemExit included.
    except BaseException as error:
        if parameters and isinstance(error, ValueError):
            # Each value is valid, but not in combination with the others.
            raise ParameterError(f"policy {name!r}: {error}") from error
        raise UnusablePolicyError(f"policy {name!r} cannot be loaded: {describe_error(error)}") from error
    declared(name, policy)
    return policy


@dataclass(frozen=True, slots=True)
class Declared:
    """What a policy declares about the system around it, as read from it once and checked.

    See `tailrace.policy.base.Policy` for the meaning of each.
    """

    when_full: WhenFull
    predictions: bool
    pacer: bool
    prefill_share: float | None
    tick_interval_s: float | None
    lengths_period_s: float | None
    prefixes_period_s: float | None


def declared(name: str, policy: Policy) -> Declared:
    """Return what the policy, which users know as `name`, declares. Raise UnusablePolicyError.

    The scheduler uses this instead of the policy's attributes, which may be anything, at any time.
    """
    try:
        share = _number("prefill_share", policy.prefill_share)
        if share is not None and not 0.0 <= share <= 1.0:
            raise ValueError(f"prefill_share: {share:g} is not from 0 to 1")
        when_full, predictions, pacer = policy.when_full, policy.predictions, policy.pacer
        if type(when_full) is not WhenFull:
            raise TypeError("when_full: not a WhenFull")
        if type(predictions) is not bool:
            raise TypeError("predictions: not true or false")
        if type(pacer) is not bool:
            raise TypeError("pacer: not true or false")
        return Declared(
            when_full,
            predictions,
            pacer,
            share,
            _period("tick_interval_s", policy.tick_interval_s),
            _period("lengths_period_s", policy.lengths_period_s),
            _period("prefixes_period_s", policy.prefixes_period_s),
        )
    except BaseException as error:
        raise UnusablePolicyError(f"policy {name!r} cannot be used: {describe_error(error)}") from error


# With less, a simulation would hardly ever end.
_LEAST_PERIOD_S: Final = 0.001


def _period(field: str, value: object) -> float | None:
    """Return a number of seconds, or None. Raise TypeError or ValueError that names the attribute."""
    number = _number(field, value)
    if number is not None and not _LEAST_PERIOD_S <= number < math.inf:
        raise ValueError(f"{field}: {number:g} is not a time of at least {_LEAST_PERIOD_S} seconds")
    return number


def _number(field: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{field}: {type(value).__name__} is neither a number nor None")
    return float(value)
