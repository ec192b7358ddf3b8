"""Find policies by name. A user's package adds one with the entry point group `tailrace.policies`."""

from __future__ import annotations

from collections.abc import Mapping

from tailrace.intra.registry import UnknownIntraError, intra_parameters
from tailrace.plugins import PluginError, load_plugin, plugins
from tailrace.policy.base import Policy, Variant
from tailrace.policy.deployment import Deployment
from tailrace.policy.parameters import NO_PARAMETERS, Parameter, ParameterError, Value, parse_parameters
from tailrace.slo import Slo

GROUP = "tailrace.policies"


class UnknownPolicyError(ValueError):
    """No policy of that name is installed."""


class UnusablePolicyError(RuntimeError):
    """A policy of that name is installed, and cannot be made; the message says why."""


def names() -> list[str]:
    """Return every name that `load` takes, those of variants and baselines included, sorted."""
    return sorted(plugins(GROUP))


def load(name: str, *, parameters: Mapping[str, Value] = NO_PARAMETERS, slo: Slo | None = None) -> Policy:
    """An instance of the policy called `name`, planning for `slo`.

    `parameters` may name those of the batch order that goes with the policy, too; they are checked, and are
    for the workers. Raises UnknownPolicyError with the known names, UnusablePolicyError when its package
    fails, ParameterError for parameters that it does not take.
    """
    deployment = Deployment() if slo is None else Deployment(slo)
    found = variant(name)
    given = {**found.parameters, **parameters}
    return make_policy(name, found.policy, found.policy.batch_order, given, deployment)


def policy_class(name: str) -> type[Policy]:
    """The class behind a name. Raises UnknownPolicyError, UnusablePolicyError."""
    return variant(name).policy


def variant(name: str) -> Variant:
    """The class behind a name, and the parameters that the name stands for: none for a policy's own name.

    Raises UnknownPolicyError, UnusablePolicyError.
    """
    if name not in plugins(GROUP):
        # Perhaps it has been installed since.
        plugins.cache_clear()
    point = plugins(GROUP).get(name)
    if point is None:
        raise UnknownPolicyError(f"unknown policy {name!r}; installed: {', '.join(names())}")
    try:
        found = load_plugin(point)
    except PluginError as error:
        raise UnusablePolicyError(f"policy {name!r} {error}") from error
    if isinstance(found, Variant):
        return found
    if isinstance(found, type) and issubclass(found, Policy):
        return Variant(found, NO_PARAMETERS)
    raise UnusablePolicyError(f"policy {name!r} ({point.value}) is not a tailrace.policy.base.Policy")


def declared_parameters(kind: type[Policy], order: str) -> tuple[Parameter, ...]:
    """What users may set of a policy: its own parameters, and those of its batch order that it has not.

    Raises UnusablePolicyError for an order that is not installed.
    """
    own = {parameter.name for parameter in kind.parameters}
    try:
        of_order = intra_parameters(order)
    except UnknownIntraError as error:
        raise UnusablePolicyError(f"{kind.__qualname__}: batch_order: {error}") from error
    return (*kind.parameters, *(p for p in of_order if p.name not in own))


def all_parameters(name: str, given: Mapping[str, Value]) -> dict[str, Value]:
    """Every parameter of a policy and its batch order with its value: the given one, else the default.

    Raises UnknownPolicyError, UnusablePolicyError, ParameterError.
    """
    found = variant(name)
    declared = declared_parameters(found.policy, found.policy.batch_order)
    return parse_parameters(f"policy {name!r}", declared, {**found.parameters, **given})


def parameters_of(name: str) -> tuple[Parameter, ...]:
    """What users may set of the policy called `name`. Raises UnknownPolicyError, UnusablePolicyError."""
    kind = policy_class(name)
    return declared_parameters(kind, kind.batch_order)


def make_policy(
    name: str, kind: type[Policy], order: str, parameters: Mapping[str, Value], deployment: Deployment
) -> Policy:
    """An instance of `kind`, which users know as `name` and run with the batch order `order`.

    Raises UnusablePolicyError, ParameterError.
    """
    values = parse_parameters(f"policy {name!r}", declared_parameters(kind, order), parameters)
    own = {parameter.name: values[parameter.name] for parameter in kind.parameters}
    try:
        return kind(**own, **deployment.facts(kind.needs))
    # Somebody else's package again.
    except Exception as error:
        if parameters and isinstance(error, ValueError):
            # Each value is allowed, but not together with the others.
            raise ParameterError(f"policy {name!r}: {error}") from error
        reason = f"{type(error).__name__}: {error}"
        raise UnusablePolicyError(f"policy {name!r} cannot be loaded: {reason}") from error
