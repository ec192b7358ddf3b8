"""Find policies by name. A user's package adds one with the entry point group `tailrace.policies`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import TypeGuard

from tailrace.actions import WhenFull
from tailrace.intra.registry import UnknownIntraError, intra_parameters
from tailrace.plugins import PluginError, describe_error, load_plugin, plugins, wrong_declaration
from tailrace.policy.base import Policy, Variant
from tailrace.policy.deployment import Deployment, Fact
from tailrace.policy.parameters import NO_PARAMETERS, Parameter, ParameterError, Value, parse_parameters
from tailrace.slo import Slo

GROUP = "tailrace.policies"


class UnknownPolicyError(ValueError):
    """No policy of that name is installed."""


class UnusablePolicyError(RuntimeError):
    """A policy of that name is installed but cannot be created; the message says why."""


def names() -> list[str]:
    """Return every name that `load` accepts, including variants and baselines, sorted."""
    return sorted(plugins(GROUP))


def load(name: str, *, parameters: Mapping[str, Value] = NO_PARAMETERS, slo: Slo | None = None) -> Policy:
    """Create the policy called `name`, planning for `slo`.

    `parameters` may include those of the policy's batch order; they are checked, and are used by the workers.
    Raise UnknownPolicyError with the known names, UnusablePolicyError if its package fails, or ParameterError
    for parameters that it does not accept.
    """
    deployment = Deployment() if slo is None else Deployment(slo)
    resolved = variant(name)
    merged = {**resolved.parameters, **parameters}
    return make_policy(name, resolved.policy, resolved.policy.batch_order, merged, deployment)


_problems: dict[EntryPoint, str] = {}


def problem_of(name: str) -> str:
    """Return why the policy called `name` cannot be used; empty: it can.

    It is created once, by whoever asks first; until it is there, others are told that it is being loaded. So
    a constructor that never returns stops one thread.
    """
    point = plugins(GROUP).get(name)
    if point is None:
        return f"unknown policy {name!r}"
    if point not in _problems:
        _problems[point] = f"policy {name!r} is still being loaded"
        try:
            load(name)
        except (UnknownPolicyError, UnusablePolicyError, ParameterError) as error:
            _problems[point] = str(error)
        else:
            _problems[point] = ""
    return _problems[point]


def policy_class(name: str) -> type[Policy]:
    """Return the class behind a name. Raise UnknownPolicyError or UnusablePolicyError."""
    return variant(name).policy


def variant(name: str) -> Variant:
    """Return the class behind a name, with the parameters that the name implies: none for a policy's own
    name.

    Raise UnknownPolicyError or UnusablePolicyError.
    """
    if name not in plugins(GROUP):
        # It may have been installed since.
        plugins.cache_clear()
    point = plugins(GROUP).get(name)
    if point is None:
        raise UnknownPolicyError(f"unknown policy {name!r}; installed: {', '.join(names())}")
    try:
        plugin = load_plugin(point)
    except PluginError as error:
        raise UnusablePolicyError(f"policy {name!r} {error}") from error
    found = Variant(plugin, NO_PARAMETERS) if _is_policy(plugin) else plugin
    if not isinstance(found, Variant) or not _is_policy(found.policy):
        raise UnusablePolicyError(f"policy {name!r} ({point.value}) is not a tailrace.policy.base.Policy")
    words = ("batch_order", "baseline_of", "summary")
    if wrong := wrong_declaration(found.policy, {"parameters": Parameter, "needs": Fact}, words):
        raise UnusablePolicyError(f"policy {name!r} ({point.value}): {wrong}")
    return found


def _is_policy(plugin: object) -> TypeGuard[type[Policy]]:
    return isinstance(plugin, type) and issubclass(plugin, Policy)


def declared_parameters(kind: type[Policy], order: str) -> tuple[Parameter, ...]:
    """Return what users may set of a policy: its own parameters, and other ones of its batch order.

    Raise UnusablePolicyError if the order is not installed.
    """
    own_names = {parameter.name for parameter in kind.parameters}
    try:
        of_order = intra_parameters(order)
    except UnknownIntraError as error:
        raise UnusablePolicyError(f"{kind.__qualname__}: batch_order: {error}") from error
    return (*kind.parameters, *(p for p in of_order if p.name not in own_names))


def all_parameters(name: str, parameters: Mapping[str, Value]) -> dict[str, Value]:
    """Return every parameter of a policy and its batch order with its value: the given one, else the default.

    Raise UnknownPolicyError, UnusablePolicyError or ParameterError.
    """
    resolved = variant(name)
    declared = declared_parameters(resolved.policy, resolved.policy.batch_order)
    return parse_parameters(f"policy {name!r}", declared, {**resolved.parameters, **parameters})


def parameters_of(name: str) -> tuple[Parameter, ...]:
    """Return what users may set of the policy called `name`. Raise UnknownPolicyError or
    UnusablePolicyError."""
    kind = policy_class(name)
    return declared_parameters(kind, kind.batch_order)


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
        when_full, predictions = policy.when_full, policy.predictions
        if type(when_full) is not WhenFull:
            raise TypeError("when_full: not a WhenFull")
        if type(predictions) is not bool:
            raise TypeError("predictions: not true or false")
        return Declared(
            when_full,
            predictions,
            share,
            _positive("tick_interval_s", policy.tick_interval_s),
            _positive("lengths_period_s", policy.lengths_period_s),
            _positive("prefixes_period_s", policy.prefixes_period_s),
        )
    except BaseException as error:
        raise UnusablePolicyError(f"policy {name!r} cannot be used: {describe_error(error)}") from error


def _positive(field: str, value: object) -> float | None:
    """Return a number above 0, or None for None. Raise TypeError or ValueError that names the attribute."""
    number = _number(field, value)
    if number is not None and not 0.0 < number < math.inf:
        raise ValueError(f"{field}: {number:g} is not above 0")
    return number


def _number(field: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{field}: {type(value).__name__} is neither a number nor None")
    return float(value)
