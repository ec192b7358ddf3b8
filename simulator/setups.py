"""The simulated system that belongs to a policy's name.

A policy declares most of its system itself: the order inside each instance, the initial pools, what a
migration does whose target is full, whether workers predict lengths. A `Setup` adds what only a simulation
can choose, as in the policy's paper and equally for every workload.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from statistics import NormalDist
from types import MappingProxyType
from typing import Final

from simulator.cluster import ClusterSpec, LengthPredictor, MigrationSpec
from simulator.request import SimRequest
from tailrace.actions import WhenFull
from tailrace.cluster import Pool
from tailrace.control.guard import PolicyFailed
from tailrace.intra.base import IntraPolicy
from tailrace.intra.guarded import guarded
from tailrace.intra.orders import Fcfs
from tailrace.intra.registry import UnknownIntraError, intra_parameters, make_intra
from tailrace.perf.horizon import FutureLoad
from tailrace.plugins import describe_error
from tailrace.policy import registry
from tailrace.policy.base import Policy
from tailrace.policy.deployment import Deployment
from tailrace.policy.parameters import Parameter, Value, parse_parameters
from tailrace.policy.pascal import Pascal
from tailrace.slo import Slo

# Simulated predictions of remaining output lengths (ARES, section 4): exact, or with ARES's error.
#
# `NoisyPredictor` errs as the paper reports for its predictor, in two parts:
#
# - Early predictions lean towards the mean output m: (1 - b) * rest + b * m, with b(g) = b0 exp(-g / fade)
#   after g tokens. Figure 7 determines b0 and fade: for requests of 30,000 to 32,000 tokens the error is
#   18,256 tokens from the prompt alone, and 2,929 after 8,000 tokens.
# - The rest is a normal error of `spread` tokens, drawn every `hold` tokens, which brings the mean error over
#   all predictions to table 1's 3,873.
#
# It predicts every `every` tokens (section 5.3: k = 20), counts down in between, and never predicts less than
# 0.

_NORMAL = NormalDist()


class OraclePredictor:
    """Predict the true remaining length."""

    def remaining(self, request: SimRequest, output_tokens: int) -> float:
        """Return the tokens still to come."""
        return float(request.output_tokens - output_tokens)


@dataclass(frozen=True)
class NoisyPredictor:
    """Predict with the errors of ARES's predictor; the module's docstring describes the model."""

    # Mean output on ShareGPT, table 2.
    mean_output: float = 7_542.0
    b0: float = 0.744
    fade: float = 3_500.0
    spread: float = 3_650.0
    hold: int = 1_000
    every: int = 20
    seed: int = 0

    def remaining(self, request: SimRequest, output_tokens: int) -> float:
        """Return the predicted tokens still to come."""
        at = output_tokens - output_tokens % self.every
        remaining = request.output_tokens - at
        lean = self.b0 * math.exp(-at / self.fade)
        error = self.spread * _normal(self.seed, request.request_id, at // self.hold)
        predicted = (1.0 - lean) * remaining + lean * self.mean_output + error
        return max(0.0, predicted - (output_tokens - at))


@lru_cache(maxsize=65_536)
def _normal(seed: int, request_id: str, draw: int) -> float:
    """Return a standard normal draw that depends on the arguments only."""
    digest = hashlib.blake2b(f"{seed}/{request_id}/{draw}".encode(), digest_size=8).digest()
    return _NORMAL.inv_cdf((int.from_bytes(digest, "big") + 0.5) / 2.0**64)


# Predictors that the workers of any policy can use.
NONE: Final = "none"
NOISY: Final = "noisy"
ORACLE: Final = "oracle"
PREDICTIONS: Final = (NONE, NOISY, ORACLE)


class UnknownSetupError(ValueError):
    """Unknown policy; the message lists the known ones or says what is wrong with the class."""


def _fail(mistake: str) -> None:
    raise PolicyFailed(mistake)


@dataclass(frozen=True, slots=True)
class Setup:
    """A policy and the system it is simulated with."""

    name: str
    kind: type[Policy]
    # Order inside an instance: a name of `tailrace.intra.registry`.
    intra_name: str
    # Share of the instances that start in the prefill pool, the others in the decode pool; None: no pools.
    prefill_share: float | None = None
    migration: MigrationSpec = field(default_factory=MigrationSpec)
    # One of PREDICTIONS.
    predicts: str = NONE
    # The same, if it was named with the policy instead of what that needs.
    named_predicts: str | None = None
    # Parameters of the policy and of the order inside an instance that differ from their defaults.
    assigned: Mapping[str, Value] = field(default_factory=dict)

    def policy(self, deployment: Deployment) -> Policy:
        """Create the policy. Raise UnknownSetupError or ParameterError."""
        try:
            return registry.make_policy(self.name, self.kind, self.intra_name, self.assigned, deployment)
        except registry.UnusablePolicyError as error:
            raise UnknownSetupError(str(error)) from error

    def intra(self, slo: Slo | None = None) -> IntraPolicy:
        """Create the order inside an instance; vLLM's own is FCFS.

        Raise UnknownSetupError or ParameterError.
        """
        intra_names = {parameter.name for parameter in intra_parameters(self.intra_name)}
        values = {name: value for name, value in self.assigned.items() if name in intra_names}
        try:
            order = make_intra(self.intra_name, values, slo)
            # As of policies: it may take as long as it likes, and the run must not go on by guesses.
            return guarded(self.intra_name, order, _fail, math.inf) or Fcfs()
        except UnknownIntraError as error:
            raise UnknownSetupError(str(error)) from error

    def with_parameters(self, changes: Mapping[str, Value]) -> Setup:
        """Return the setup with these parameters, parsed. Raise UnknownSetupError or ParameterError.

        What the policy declares with these parameters applies, such as other pool sizes.
        """
        values = parse_parameters(f"policy {self.name!r}", self.parameters(), changes)
        setup = replace(self, assigned={**self.assigned, **{name: values[name] for name in changes}})
        # Reject values that contradict each other.
        setup.intra()
        return setup._declared()

    def _declared(self) -> Setup:
        """Return the setup with what the policy declares. Raise UnknownSetupError or ParameterError."""
        policy = self.policy(Deployment())
        predicts = self.named_predicts or (NOISY if policy.predictions else NONE)
        return replace(self, prefill_share=policy.prefill_share, predicts=predicts)

    def parameters(self) -> tuple[Parameter, ...]:
        """Return the parameters that can be set. Raise UnknownSetupError."""
        try:
            return registry.declared_parameters(self.kind, self.intra_name)
        except registry.UnusablePolicyError as error:
            raise UnknownSetupError(str(error)) from error

    def with_pools(self, prefill: int, instances: int) -> Setup:
        """Return the setup with `prefill` of `instances` in the prefill pool, if it has pools at all."""
        return self if self.prefill_share is None else replace(self, prefill_share=prefill / instances)

    def apply(self, spec: ClusterSpec, mean_output_tokens: float | None = None) -> ClusterSpec:
        """Return the cluster with this setup's pools, migration and predictions.

        The noisy predictor's error scales with the workload's `mean_output_tokens`; None: those of ARES's own
        workload. A single instance cannot be divided into pools.
        """
        spec = replace(spec, migration=self.migration)
        count = len(spec.instances)
        if self.prefill_share is not None and count > 1:
            prefill = min(max(round(self.prefill_share * count), 1), count - 1)
            spec = spec.with_pools([Pool.PREFILL] * prefill + [Pool.DECODE] * (count - prefill))
        predictor = predictor_for(self.predicts, mean_output_tokens)
        return replace(spec, predictor=predictor, future_load=None if predictor is None else FutureLoad())


def predictor_for(predicts: str, mean_output_tokens: float | None = None) -> LengthPredictor | None:
    """Return the predictor of that name, or None for "none". Raise UnknownSetupError.

    ARES reports its predictor's errors in tokens, for outputs of 7,542 tokens on average. For other workloads
    they are scaled with the mean, as is the time that the predictor takes to learn.
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


# PASCAL's migrations do not overlap with decoding, because the end of a phase cannot be predicted; the paper
# limits neither their number nor their wait.
_PASCAL: Final = MigrationSpec(
    limit=256, queue_limit=10_000, patience_s=600.0, when_full=WhenFull.HOST, max_rounds=0
)
# Migration specs of policies that differ from the default.
_MIGRATIONS: Final[Mapping[type[Policy], MigrationSpec]] = MappingProxyType({Pascal: _PASCAL})
# Named like a parameter of the policy: what workers predict, which only a simulation can choose.
_PREDICT: Final = "predict="

FORMER: Final[Mapping[str, str]] = MappingProxyType(
    {"ares_oracle": "ares predict=oracle", "llumnix": "tailrace.policy.cascade.llumnix:Llumnix"}
)
"""As `tailrace.policy.registry.FORMER`, of what only a simulation has."""


def setup_for(text: str) -> Setup:
    """Return the setup of `NAME[+ORDER] [KEY=VALUE ...]`, as `tailrace.policy.registry.choose` reads it.

    NAME may be `module:Class`, and `predict` of the parameters one of PREDICTIONS. Raise UnknownSetupError or
    ParameterError.
    """
    name, order, words = registry.parts_of(text)
    predicts = [word.removeprefix(_PREDICT) for word in words if word.startswith(_PREDICT)]
    for predicted in predicts:
        predictor_for(predicted)
    assignments = [word for word in words if not word.startswith(_PREDICT)]
    try:
        choice = registry.chosen(text, _policy_class(name), order, assignments)
    except (registry.UnknownPolicyError, registry.UnusablePolicyError) as error:
        raise UnknownSetupError(str(error)) from error
    setup = Setup(
        text,
        choice.policy,
        choice.order,
        migration=_MIGRATIONS.get(choice.policy) or MigrationSpec(when_full=choice.policy.when_full),
        named_predicts=predicts[-1] if predicts else None,
        assigned=dict(choice.parameters),
    )
    return setup._declared()


def _policy_class(name: str) -> type[Policy]:
    """Return the policy that is installed under this name, or the class `module:Class`."""
    module, colon, attribute = name.partition(":")
    if not colon:
        try:
            return registry.policy_class(name)
        except registry.UnknownPolicyError as error:
            if name in FORMER:
                raise UnknownSetupError(registry.former(name, FORMER[name])) from error
            raise UnknownSetupError(f"{error}; or your own as module:Class") from error
    try:
        kind: object = getattr(import_module(module), attribute, None)
    except ImportError as error:
        raise UnknownSetupError(f"policy {name!r}: {error}") from error
    except KeyboardInterrupt:
        raise
    # The user's module may fail in any way, even by sys.exit().
    except BaseException as error:
        raise UnknownSetupError(f"policy {name!r} cannot be loaded: {describe_error(error)}") from error
    if kind is None:
        raise UnknownSetupError(f"policy {name!r}: {module} has no {attribute}")
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise UnknownSetupError(f"policy {name!r} is not a class derived from tailrace.policy.base.Policy")
    return kind
