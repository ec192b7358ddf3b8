"""Numbers of a cluster's instances by column, for policies that compare all of them at each decision.

Between two decisions few of a thousand instances have changed. An instance's view is immutable, so what was
read from it holds for as long as the cluster's view contains the same object: such a cache does not affect
decisions, and a policy that has one is still a function of its view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from operator import is_not

import numpy as np
from numpy.typing import NDArray

from tailrace.cluster import InstanceView
from tailrace.perf.steps import Floats

Mask = NDArray[np.bool_]


class SeenInstances:
    """The instances of the previous decision, in instance-id order."""

    def __init__(self) -> None:
        self.views: Sequence[InstanceView] = ()
        # Positions in `views` by instance id.
        self.at: dict[str, int] = {}

    def changed(self, views: Sequence[InstanceView]) -> list[int] | None:
        """Return the positions of those that differ from the instances of the previous decision.

        None: other instances are among them, or in another order; then the previous ones are forgotten.
        """
        if len(self.views) == len(views):
            changed = list(compress(range(len(views)), map(is_not, self.views, views)))
            if all(self.views[n].instance_id == views[n].instance_id for n in changed):
                return changed
        self.forget()
        return None

    def replace(self, views: Sequence[InstanceView]) -> None:
        """Remember these instances, once those that changed have been read."""
        self.views = views
        if not self.at:
            self.at = {view.instance_id: n for n, view in enumerate(views)}

    def forget(self) -> None:
        """Forget all instances."""
        self.views, self.at = (), {}


class Columns:
    """An array of numbers, [columns, instances], one of whose rows `read` returns for each instance."""

    def __init__(self, read: Callable[[InstanceView], Sequence[float]], columns: int) -> None:
        """`read` must depend on nothing but the view."""
        self.seen = SeenInstances()
        self._read = read
        self._values: Floats = np.empty((columns, 0))

    def update(self, instances: Iterable[InstanceView]) -> Floats:
        """Return the columns of these instances, valid until the next call, and not to be changed."""
        views, read = list(instances), self._read
        changed = self.seen.changed(views)
        if changed is None:
            rows = np.array([read(view) for view in views], dtype=np.float64)
            self._values = rows.reshape(len(views), len(self._values)).T
        else:
            for n in changed:
                self._values[:, n] = read(views[n])
        self.seen.replace(views)
        return self._values


def smallest(values: Floats, among: Mask) -> int:
    """Return the position of the smallest finite value among those where `among` is true; the first of
    equals."""
    return int(np.where(among, values, np.inf).argmin())
