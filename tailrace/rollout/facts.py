"""What rollouts go by: the fleet as it is now. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tailrace.model_identity import covers, fingerprint
from tailrace.rollout.record import RolloutRecord


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """An instance as it is now."""

    instance_id: str
    # Empty: it does not tell.
    key: str
    # As its worker was told (--model).
    model: str
    # Why it cannot take new requests, whatever a rollout says; empty: it can.
    unavailable: str = ""
    requests: int = 0
    moving: int = 0
    takes_adapters: bool = False
    # It has drained for long enough to know that nothing is on its way there, and has nothing.
    empty: bool = False


@dataclass(frozen=True, slots=True)
class FrontEndFacts:
    """A front end as its record tells."""

    frontend_id: str
    # What users call the model; empty: it does not tell.
    name: str
    # Of the model that it was started with, and the model as it was told (--model).
    key: str
    model: str
    # Keys of the models to whose instances it is connected.
    connected: frozenset[str] = frozenset()

    @property
    def has_weights(self) -> bool:
        """Whether it had weights to look at; else it goes by the name of its model."""
        return ":" in self.key

    def uses(self, instance: InstanceFacts, rollouts: Mapping[str, RolloutRecord]) -> bool:
        """Whether it sends new requests to instances of this model. `rollouts`: all, by name."""
        rollout = rollouts.get(self.name)
        if rollout is None or not rollout.steers(self.key):
            return self.answers(instance)
        return bool(instance.key) and covers(rollout.in_force, instance.key)

    def answers(self, instance: InstanceFacts) -> bool:
        """Whether it sends new requests to this instance while no record says where."""
        if not instance.key or not covers(self.key, instance.key):
            return False
        return self.has_weights or instance.model == self.model


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """Everything a rollout goes by."""

    instances: Mapping[str, InstanceFacts]
    frontends: Mapping[str, FrontEndFacts]
    # By the name that users call the model.
    rollouts: Mapping[str, RolloutRecord] = field(default_factory=dict)

    def users(self, instance: InstanceFacts) -> list[str]:
        """Names whose new requests go to this instance's model."""
        fronts = self.frontends.values()
        return sorted({front.name for front in fronts if front.name and front.uses(instance, self.rollouts)})

    def serving(self, model: str) -> list[FrontEndFacts]:
        """Front ends whose users call a model so."""
        return [front for front in self.frontends.values() if front.name == model]

    def running(self, key: str) -> list[InstanceFacts]:
        """Instances of the model, in id order; those that do not tell are none."""
        return [self.instances[name] for name in sorted(self.instances) if self._runs(name, key)]

    def warm(self, key: str) -> list[InstanceFacts]:
        """Those of them that can take requests."""
        return [instance for instance in self.running(key) if not instance.unavailable]

    def warm_retiring(self, before: str, new: str) -> list[InstanceFacts]:
        """Those of `before` that can take requests; of two precisions of its weights, not those of `new`."""
        return [instance for instance in self.warm(before) if not covers(new, instance.key)]

    def cold(self, key: str) -> str:
        """Why no instance of the model can take requests, in words."""
        reasons = [f"{i.instance_id} {i.unavailable}" for i in self.running(key)]
        return f"no instance of {fingerprint(key)} is warm: {', '.join(reasons) or 'there is none'}"

    def _runs(self, name: str, key: str) -> bool:
        found = self.instances[name].key
        return bool(found) and covers(key, found)


def first_few(names: list[str]) -> str:
    """The first three names, and how many more there are."""
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
