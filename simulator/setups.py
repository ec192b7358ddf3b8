"""What goes with a policy's name when it is simulated.

A policy of the fleet is half of a system. The other half is the order inside each instance, the pools at the
start, what becomes of a migration whose target is full, and what the workers predict. A `Setup` is both, as
its paper has it, and the same on every workload. Names are those of `tailrace.policies`, PASCAL's baselines
`fcfs` and `rr`, and `module:Class` for a policy that is not installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import MappingProxyType
from typing import Final

from simulator.cluster import ClusterSpec, MigrationSpec
from simulator.hooks import LengthPredictor
from simulator.predictors import NoisyPredictor, OraclePredictor
from tailrace.cluster import Pool
from tailrace.intra.base import IntraPolicy
from tailrace.intra.fcfs import Fcfs
from tailrace.intra.registry import intra_for_policy, intra_parameters, make_intra
from tailrace.policy import registry
from tailrace.policy.ares.future_load import FutureLoad
from tailrace.policy.arrow.policy import PREFILL_SHARE
from tailrace.policy.base import Policy
from tailrace.policy.deployment import Deployment
from tailrace.policy.parameters import Parameter, Value, parse_parameters
from tailrace.policy.when_full import WhenFull
from tailrace.slo import Slo

# Names of predictions that workers can be given, whatever the policy.
PREDICTIONS: Final = ("none", "noisy", "oracle")


class UnknownSetupError(ValueError):
    """No such policy; the message names those that there are, or says what is wrong with the class."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A policy and what it is simulated with."""

    name: str
    # Of the registry, or `module:Class`.
    policy_name: str
    # Order inside an instance, a name of `tailrace.intra.registry`.
    intra_name: str
    # Share of the instances in the prefill pool at the start, the others in the decode pool; None: no pools.
    prefill_share: float | None = None
    migration: MigrationSpec = field(default_factory=MigrationSpec)
    # One of PREDICTIONS.
    predicts: str = "none"
    # Parameters of the policy and of the order inside an instance that are not at their defaults.
    given: Mapping[str, Value] = field(default_factory=dict)

    def policy(self, deployment: Deployment) -> Policy:
        """A new policy. Raises UnknownSetupError, ParameterError."""
        kind = _policy_class(self.policy_name)
        try:
            return registry.make_policy(self.name, kind, self.intra_name, self.given, deployment)
        except registry.UnusablePolicyError as error:
            raise UnknownSetupError(str(error)) from error

    def intra(self, slo: Slo | None = None) -> IntraPolicy:
        """A new order inside the instance; vLLM's own is first come, first served. Raises ParameterError."""
        own = {parameter.name for parameter in intra_parameters(self.intra_name)}
        given = {name: value for name, value in self.given.items() if name in own}
        return make_intra(self.intra_name, given, slo) or Fcfs()

    def with_parameters(self, given: Mapping[str, Value]) -> Setup:
        """The same with these parameters, in their types. Raises UnknownSetupError, ParameterError.

        A policy that divides the instances into pools by a parameter starts with pools of that size.
        """
        values = parse_parameters(f"policy {self.name!r}", self.parameters(), given)
        setup = replace(self, given={name: values[name] for name in given})
        share = setup.given.get(PREFILL_SHARE.name)
        if setup.prefill_share is not None and isinstance(share, float):
            setup = replace(setup, prefill_share=share)
        # Values may contradict each other.
        setup.policy(Deployment())
        setup.intra()
        return setup

    def parameters(self) -> tuple[Parameter, ...]:
        """What can be set. Raises UnknownSetupError."""
        return registry.declared_parameters(_policy_class(self.policy_name), self.intra_name)

    def with_pools(self, prefill: int, instances: int) -> Setup:
        """The same with `prefill` of `instances` in the prefill pool, if it starts with pools at all."""
        return self if self.prefill_share is None else replace(self, prefill_share=prefill / instances)

    def apply(self, spec: ClusterSpec, mean_output_tokens: float | None = None) -> ClusterSpec:
        """The cluster with this setup's pools, migration and predictions.

        `mean_output_tokens` is the workload's, which the error of the noisy predictor scales with; None:
        that of ARES's own workload. Of a single instance no pools can be made.
        """
        spec = replace(spec, migration=self.migration)
        count = len(spec.instances)
        if self.prefill_share is not None and count > 1:
            prefill = min(max(round(self.prefill_share * count), 1), count - 1)
            spec = spec.with_pools([Pool.PREFILL] * prefill + [Pool.DECODE] * (count - prefill))
        predictor = predictor_for(self.predicts, mean_output_tokens)
        return replace(spec, predictor=predictor, future_load=None if predictor is None else FutureLoad())


def predictor_for(predicts: str, mean_output_tokens: float | None = None) -> LengthPredictor | None:
    """The predictor of that name; None for "none". Raises UnknownSetupError.

    ARES reports its predictor's errors in tokens, on outputs of 7,542 tokens on average. For other workloads
    they are taken as shares of the mean, and so is how long it takes to learn.
    """
    match predicts:
        case "none":
            return None
        case "oracle":
            return OraclePredictor()
        case "noisy":
            ares = NoisyPredictor()
            if mean_output_tokens is None:
                return ares
            factor = mean_output_tokens / ares.mean_output
            return replace(
                ares,
                mean_output=mean_output_tokens,
                fade=ares.fade * factor,
                spread=ares.spread * factor,
                hold=max(1, round(ares.hold * factor)),
            )
    raise UnknownSetupError(f"unknown prediction {predicts!r}; known: {', '.join(PREDICTIONS)}")


# PASCAL spills to host memory at the target; its migrations do not overlap with decoding, since a phase's end
# cannot be foreseen, and the paper bounds neither their number nor their wait.
_PASCAL = MigrationSpec(
    limit=256, queue_limit=10_000, patience_s=600.0, when_full=WhenFull.HOST, max_rounds=0
)
# 1P+3D (ARES, section 6.1) and 4P+4D (Arrow, section 7.3).
_ARES_PREFILL: Final = 0.25
_ARROW_PREFILL: Final = 0.5

_SPECIAL: Final[Mapping[str, Setup]] = MappingProxyType(
    {
        setup.name: setup
        for setup in (
            # PASCAL's baselines (section V-A).
            Setup("fcfs", "min_kv", "fcfs", migration=_PASCAL),
            Setup("rr", "min_kv", "round_robin", migration=_PASCAL),
            *(
                Setup(name, name, intra_for_policy(name), migration=_PASCAL)
                for name in ("pascal", "pascal_no_migration", "pascal_non_adaptive")
            ),
            *(
                Setup(name, name, intra_for_policy(name), _ARES_PREFILL, predicts=predicts)
                for name, predicts in (
                    ("current_load", "none"),
                    ("ares_no_prediction", "none"),
                    ("ares", "noisy"),
                    ("ares_oracle", "oracle"),
                )
            ),
            *(
                Setup(name, name, intra_for_policy(name), _ARROW_PREFILL)
                for name in ("arrow", "minimal_load", "round_robin_pools", "static_pools")
            ),
        )
    }
)


def setup_names() -> list[str]:
    """Every name that `setup_for` knows, sorted."""
    return sorted({*registry.names(), *_SPECIAL})


def setup_for(name: str) -> Setup:
    """The setup of that name. Raises UnknownSetupError with the known names.

    A policy of which nothing special is known starts without pools, in the engine's own order, without
    predictions.
    """
    if name in _SPECIAL:
        return _SPECIAL[name]
    if ":" not in name and name not in registry.names():
        known = ", ".join(setup_names())
        raise UnknownSetupError(f"unknown policy {name!r}; known: {known}; or your own as module:Class")
    migration = MigrationSpec(when_full=_policy_class(name).when_full)
    return Setup(name, name, intra_for_policy(name), migration=migration)


def _policy_class(name: str) -> type[Policy]:
    if ":" not in name:
        try:
            return registry.policy_class(name)
        except registry.UnusablePolicyError as error:
            raise UnknownSetupError(str(error)) from error
    module, _, attribute = name.partition(":")
    try:
        found: object = getattr(import_module(module), attribute)
    except ImportError as error:
        raise UnknownSetupError(f"policy {name!r}: {error}") from error
    except AttributeError as error:
        raise UnknownSetupError(f"policy {name!r}: {module} has no {attribute}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise UnknownSetupError(f"policy {name!r} is not a class derived from tailrace.policy.base.Policy")
    return found
