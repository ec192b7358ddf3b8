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
    if isinstance(plugin, Variant):
        return plugin
    if isinstance(plugin, type) and issubclass(plugin, Policy):
        return Variant(plugin, NO_PARAMETERS)
    raise UnusablePolicyError(f"policy {name!r} ({point.value}) is not a tailrace.policy.base.Policy")


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
        return kind(**own_values, **deployment.facts(kind.needs))
    # The package may be third-party, and raise anything.
    except Exception as error:
        if parameters and isinstance(error, ValueError):
            # Each value is valid, but not in combination with the others.
            raise ParameterError(f"policy {name!r}: {error}") from error
        reason = f"{type(error).__name__}: {error}"
        raise UnusablePolicyError(f"policy {name!r} cannot be loaded: {reason}") from error
