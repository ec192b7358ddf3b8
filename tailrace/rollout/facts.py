"""The state of the fleet that rollouts depend on. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tailrace.model_identity import covers, fingerprint
from tailrace.rollout.record import RolloutRecord


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """The current state of an instance."""

    instance_id: str
    # Key of its model.
    key: str
    # The worker's --model.
    model: str
    # Why it cannot take new requests regardless of any rollout; empty: it can.
    unavailable: str = ""
    requests: int = 0
    moving: int = 0
    takes_adapters: bool = False
    # It has no requests, and has drained for long enough that none are in flight to it.
    empty: bool = False


@dataclass(frozen=True, slots=True)
class FrontEndFacts:
    """A front end according to its record."""

    frontend_id: str
    # The public name of its model.
    name: str
    # Key of the model that it was started with, and its --model.
    key: str
    model: str
    # Keys of the models whose instances it is connected to.
    connected: frozenset[str] = frozenset()

    @property
    def has_weights(self) -> bool:
        """Return whether it identified the weights; if not, models are compared by name."""
        return ":" in self.key

    def uses(self, instance: InstanceFacts, rollouts: Mapping[str, RolloutRecord]) -> bool:
        """Return whether it sends new requests to instances of this model. `rollouts`: all, by name."""
        rollout = rollouts.get(self.name)
        if rollout is None or not rollout.steers(self.key):
            return self.would_use(instance)
        return covers(rollout.in_force, instance.key)

    def would_use(self, instance: InstanceFacts) -> bool:
        """Return whether it sends new requests to this instance while no rollout decides."""
        return covers(self.key, instance.key) and (self.has_weights or instance.model == self.model)


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """Everything that rollouts depend on."""

    instances: Mapping[str, InstanceFacts]
    frontends: Mapping[str, FrontEndFacts]
    # By the model's public name.
    rollouts: Mapping[str, RolloutRecord] = field(default_factory=dict)

    def names_using(self, instance: InstanceFacts) -> list[str]:
        """Return the public names whose new requests go to this instance's model."""
        fronts = self.frontends.values()
        return sorted({front.name for front in fronts if front.uses(instance, self.rollouts)})

    def serving(self, model: str) -> list[FrontEndFacts]:
        """Return front ends that serve this public name."""
        return [front for front in self.frontends.values() if front.name == model]

    def running(self, key: str) -> list[InstanceFacts]:
        """Return instances of the model in id order."""
        return [i for _, i in sorted(self.instances.items()) if covers(key, i.key)]

    def warm(self, key: str) -> list[InstanceFacts]:
        """Return instances of the model that can take requests."""
        return [instance for instance in self.running(key) if not instance.unavailable]

    def warm_retiring(self, before: str, new: str) -> list[InstanceFacts]:
        """Return warm instances of `before` that are not also of `new` (another precision of the same
        weights)."""
        return [instance for instance in self.warm(before) if not covers(new, instance.key)]

    def why_not_warm(self, key: str) -> str:
        """Return in words why no instance of the model can take requests."""
        reasons = [f"{i.instance_id} {i.unavailable}" for i in self.running(key)]
        return f"no instance of {fingerprint(key)} is warm: {', '.join(reasons) or 'there is none'}"


def list_some(names: list[str]) -> str:
    """Return the first three names, and how many more there are."""
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
