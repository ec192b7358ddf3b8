"""Which instances are alike: those that may answer one request, those that can go on with its answer, and
those that can exchange its KV."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from tailrace.model_identity import difference, is_model
from tailrace.records import InstanceRecord

_NOBODY: Final[frozenset[str]] = frozenset()
# Keys of models that were asked for; front ends of one cluster ask for few.
_ASKED_MAX: Final = 256


class ModelGroups:
    """Of one membership. Pure."""

    def __init__(self, instances: Mapping[str, InstanceRecord]) -> None:
        self._instances = instances
        self._asked: dict[str, frozenset[str]] = {}
        self._going_on: dict[str, frozenset[str]] = {}
        by_kv: dict[str, set[str]] = defaultdict(set)
        for name, record in instances.items():
            by_kv[record.model_fingerprint].add(name)
        self._by_kv = {fingerprint: frozenset(names) for fingerprint, names in by_kv.items()}

    def running(self, model: str) -> frozenset[str]:
        """Instances that run the model of this key (tailrace.model_identity)."""
        found = self._asked.get(model)
        if found is None:
            found = frozenset(n for n, r in self._instances.items() if is_model(r.model_identity, model))
            if len(self._asked) < _ASKED_MAX:
                self._asked[model] = found
        return found

    def going_on(self, instance_id: str) -> frozenset[str]:
        """Instances that can go on with this one's answers, by replay if not live; itself among them."""
        found = self._going_on.get(instance_id)
        if found is None:
            record = self._instances.get(instance_id)
            if record is None:
                return _NOBODY
            identity = record.model_identity
            alike = {n for n, r in self._instances.items() if not difference(identity, r.model_identity)}
            found = self._going_on[instance_id] = self.exchanging_kv(instance_id) | alike
        return found

    def exchanging_kv(self, instance_id: str) -> frozenset[str]:
        """Instances that can take KV from this one, itself among them."""
        record = self._instances.get(instance_id)
        return _NOBODY if record is None else self._by_kv[record.model_fingerprint]
