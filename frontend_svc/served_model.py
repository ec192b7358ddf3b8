"""Which instances run the model that a front end serves."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.model_identity import ModelIdentity, is_model
from tailrace.records import InstanceRecord


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`name` is what the front end was started with: a folder, or a name."""

    name: str
    identity: ModelIdentity

    @property
    def key(self) -> str:
        """Stands for every instance that may answer here, whatever precision it was told to use."""
        return self.identity.key

    def is_run_by(self, record: InstanceRecord) -> bool:
        """Whether an instance may answer here.

        The same configuration, tokenizer and weights. Where the front end has no weights to look at, an
        instance must have been started with the same name of a model instead.
        """
        if not is_model(record.model_identity, self.key):
            return False
        return bool(self.identity.weights) or record.model_identity is None or record.model == self.name
