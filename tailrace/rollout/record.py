"""The record of a rolling change of the model behind a served name, as it is in etcd. Pure.

One name that users call can be carried by instances of two models at once, as long as both have the same
configuration and tokenizer. The record says which of them takes new requests. A request keeps to the one
that made its first token.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec
from msgspec.structs import replace

from tailrace.model_identity import covers, text_of

PREPARE_S: Final = 60.0
"""How long instances and front ends may take, by default, until new requests can go to the new model."""


class RolloutState(enum.StrEnum):
    """How far it is."""

    # Front ends connect to instances of the new model; new requests go where they went before.
    PREPARING = "preparing"
    # New requests go to the new model; the old instances are emptied one after the other.
    DRAINING = "draining"
    DONE = "done"
    # It was given up while it was prepared: new requests go where they went before.
    FAILED = "failed"


_ORDER: Final = {state: number for number, state in enumerate(RolloutState)}


class RolloutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`rollouts/<served name>`: which model takes new requests of that name, since when and instead of
    which. Keys as in tailrace.model_identity; times are seconds since the epoch, 0: not yet."""

    model: str
    before: str
    new: str
    state: RolloutState
    # Instances of the old model that drain. A worker that comes back under the same name with the new one
    # does not.
    draining: list[str] = []
    # It takes another rollout back.
    undoes: bool = False
    begun_s: float
    # If it is not prepared after so long, it has failed. Each leader measures that from when it first saw it.
    prepare_s: float = PREPARE_S
    # So many instances of the new model must be warm before new requests go there.
    min_warm: int = 1
    switched_s: float = 0.0
    # When the last instance began to drain.
    step_s: float = 0.0
    ended_s: float = 0.0
    # Why it failed.
    reason: str = ""

    @property
    def in_force(self) -> str:
        """Key of the model that takes new requests."""
        return self.new if self.state in (RolloutState.DRAINING, RolloutState.DONE) else self.before

    @property
    def step(self) -> tuple[float, RolloutState, float]:
        """Stands for what it waits for now: another one, and the waiting begins anew."""
        return (self.begun_s, self.state, self.step_s)

    @property
    def under_way(self) -> bool:
        """Whether it goes on by itself."""
        return self.state in (RolloutState.PREPARING, RolloutState.DRAINING)

    def newer_than(self, other: RolloutRecord) -> bool:
        """Whether this one, of the same name, was written after the other, as far as it matters to front
        ends. `begin` and `undo` see to it that `begun_s` grows whatever the clocks of schedulers say."""
        return (self.begun_s, _ORDER[self.state]) > (other.begun_s, _ORDER[other.state])

    def has_model(self, key: str) -> bool:
        """Whether this is one of its two models."""
        return covers(self.before, key) or covers(self.new, key)

    def retires(self, key: str) -> bool:
        """Whether this is the model that goes."""
        return covers(self.before, key) and not covers(self.new, key)

    def steers(self, key: str) -> bool:
        """Whether it says where a front end of this model sends new requests: it can speak to both models."""
        return text_of(key) == text_of(self.new)

    def given_up(self, reason: str, now_s: float) -> RolloutRecord:
        """The same one after it has failed."""
        return replace(self, state=RolloutState.FAILED, reason=reason, ended_s=now_s)
