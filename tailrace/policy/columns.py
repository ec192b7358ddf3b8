"""Numbers of a cluster's instances by column, for policies that compare all of them at each decision.

Between two decisions few of a thousand instances have changed. An instance's view is immutable, so what was
read from it holds for as long as the cluster's view contains the same object: such a cache does not affect
decisions, and a policy that has one is still a function of its view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from operator import is_not
from typing import Final, Generic, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np

from tailrace.cluster import ClusterView, InstanceView, ViewChanges
from tailrace.perf.steps import Floats
from tailrace.policy.requests import Mask

# Instances from which a comparison by column takes less time than one by one.
COLUMNS_MIN: Final = 32


def has_many(view: ClusterView) -> bool:
    """Return whether the view has so many instances that comparing them by column pays."""
    return len(view.instances) >= COLUMNS_MIN


class SeenInstances:
    """The instances of the previous decision, in instance-id order.

    By name, and their views only if nothing else tells what has changed: a view keeps all requests of its
    instance alive. Those of a thousand instances, kept from one tick to the next, would be scanned by the
    garbage collector, and freed all at once, while placements wait.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        # Positions in `names` by instance id.
        self.at: dict[str, int] = {}
        # Weak: `PerInstances` keeps this for as long as the changes live.
        self._changes: ReferenceType[ViewChanges] | None = None
        self._version = 0
        # Empty if the changes are known.
        self._views: list[InstanceView] = []

    def changed(self, view: ClusterView) -> list[int] | None:
        """Return the positions of instances that differ from those of the previous decision.

        None: other instances are among them, or in another order; then the previous ones are forgotten.
        """
        if view.changes is not None and self._changes is not None and view.changes is self._changes():
            names = view.changes.between(self._version, view.version)
            return list(range(len(self.names))) if names is None else sorted(map(self.at.__getitem__, names))
        views = list(view.instances.values())
        if len(self._views) == len(self.names) == len(views):
            # An instance's view is immutable, and compared by identity.
            changed = list(compress(range(len(views)), map(is_not, self._views, views)))
            if all(self.names[n] == views[n].instance_id for n in changed):
                return changed
        self.forget()
        return None

    def replace(self, view: ClusterView, changed: Iterable[int] | None) -> None:
        """Remember these instances, once those that changed have been read. `changed`: as returned for this
        view."""
        if changed is None:
            self.names = list(view.instances)
            self.at = {name: n for n, name in enumerate(self.names)}
        self._views = [] if view.changes is not None else list(view.instances.values())
        self._changes, self._version = None if view.changes is None else ref(view.changes), view.version

    def forget(self) -> None:
        """Forget all instances."""
        self.names, self.at, self._changes, self._views = [], {}, None, []


class Columns:
    """An array of numbers, [columns, instances], one of whose rows `read` returns for each instance."""

    def __init__(self, read: Callable[[InstanceView], Sequence[float]], columns: int) -> None:
        """`read` must depend on nothing but the view."""
        self.seen = SeenInstances()
        self._read = read
        self._values: Floats = np.empty((columns, 0))

    def update(self, view: ClusterView) -> Floats:
        """Return the columns of a view's instances, valid until the next call, and not to be changed."""
        read, changed = self._read, self.seen.changed(view)
        if changed is None:
            rows = np.array([read(instance) for instance in view.instances.values()], dtype=np.float64)
            # Each column in one piece: policies compute with whole columns at each decision.
            self._values = np.ascontiguousarray(rows.reshape(len(view.instances), len(self._values)).T)
        else:
            for n in changed:
                self._values[:, n] = read(view.instances[self.seen.names[n]])
        self.seen.replace(view, changed)
        return self._values


T = TypeVar("T")


class PerInstances(Generic[T]):
    """One cache for each set of instances of which a cluster's model makes views, such as those that run one
    model: otherwise each decision would read all instances again where several models share a cluster."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        # For all views whose changes are not known.
        self._unknown = make()
        self._known: WeakKeyDictionary[ViewChanges, T] = WeakKeyDictionary()

    def of(self, view: ClusterView) -> T:
        """Return the cache for the view's set of instances."""
        if view.changes is None:
            return self._unknown
        value = self._known.get(view.changes)
        if value is None:
            value = self._known[view.changes] = self._make()
        return value


def smallest(values: Floats, among: Mask) -> int:
    """Return the position of the smallest finite value among those where `among` is true; the first of
    equals."""
    return int(np.where(among, values, np.inf).argmin())
