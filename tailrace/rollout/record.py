"""The record of a rollout in etcd: a rolling change of the model behind a public name. Pure.

Instances of two models can serve one public name at the same time if both have the same configuration and
tokenizer. The record says which of them takes new requests. A request stays with the model that made its
first token.
"""

from __future__ import annotations

import enum
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from tailrace.model_identity import covers, text_of

PREPARE_S: Final = 60.0
"""Default time, in seconds, for instances and front ends to get ready for the new model."""


_Time = Annotated[float, Meta(ge=0.0, le=1e15)]


class RolloutState(enum.StrEnum):
    """The state of a rollout."""

    # Front ends connect to instances of the new model; new requests go to the old one.
    PREPARING = "preparing"
    # New requests go to the new model; the old instances are drained one after the other.
    DRAINING = "draining"
    DONE = "done"
    # It failed while preparing: new requests go to the old model.
    FAILED = "failed"


_ORDER: Final = {state: number for number, state in enumerate(RolloutState)}


class RolloutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The value of `rollouts/<public name>`: which model takes new requests, since when, and instead of
    which.

    Keys as in tailrace.model_identity; times are seconds since the epoch, 0: not yet.
    """

    model: str
    before: str
    new: str
    state: RolloutState
    # Draining instances of the old model. A worker that returns under the same name with the new model is not
    # one.
    draining: list[str] = []
    # Whether it undoes another rollout.
    undoes: bool = False
    begun_s: _Time
    # Seconds after which preparing has failed, measured by each leader from when it first saw the rollout.
    prepare_s: _Time = PREPARE_S
    # Number of instances of the new model that must be warm before new requests go there.
    min_warm: Annotated[int, Meta(ge=0, le=2**53)] = 1
    switched_s: _Time = 0.0
    # When the last instance began to drain.
    step_s: _Time = 0.0
    ended_s: _Time = 0.0
    # Why it failed.
    reason: str = ""

    @property
    def in_force(self) -> str:
        """Return the key of the model that takes new requests."""
        return self.new if self.state in (RolloutState.DRAINING, RolloutState.DONE) else self.before

    @property
    def step(self) -> tuple[float, RolloutState, float]:
        """Return an identity of the current step; when it changes, waiting starts again."""
        return (self.begun_s, self.state, self.step_s)

    @property
    def under_way(self) -> bool:
        """Return whether the rollout is in progress."""
        return self.state in (RolloutState.PREPARING, RolloutState.DRAINING)

    def newer_than(self, other: RolloutRecord) -> bool:
        """Return whether this record was written after the other one of the same name, as far as front ends
        care.

        `begin` and `undo` make sure that `begun_s` increases whatever the schedulers' clocks say.
        """
        return (self.begun_s, _ORDER[self.state]) > (other.begun_s, _ORDER[other.state])

    def has_model(self, key: str) -> bool:
        """Return whether this is one of the rollout's two models."""
        return covers(self.before, key) or covers(self.new, key)

    def retires(self, key: str) -> bool:
        """Return whether this is the model being replaced."""
        return covers(self.before, key) and not covers(self.new, key)

    def steers(self, key: str) -> bool:
        """Return whether the rollout decides for a front end of this model, which must have the same
        tokenizer."""
        return text_of(key) == text_of(self.new)

    def failed_because(self, reason: str, now_s: float) -> RolloutRecord:
        """Return the record in the state FAILED."""
        return replace(self, state=RolloutState.FAILED, reason=reason, ended_s=now_s)
