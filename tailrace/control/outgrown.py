"""Requests that have outgrown their instance's stage: the policy is asked once about each."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class OutgrownRequests:
    """The instance on which each such request was found last. Pure."""

    def __init__(self, found: Mapping[str, str]) -> None:
        """`found`: instance by request, as `found` returns it."""
        self._found = dict(found)
        self._on: dict[str, set[str]] = {}
        for request_id, instance_id in found.items():
            self._on.setdefault(instance_id, set()).add(request_id)

    @property
    def found(self) -> dict[str, str]:
        """Return the instance of each request."""
        return dict(self._found)

    def add(self, request_id: str, instance_id: str) -> bool:
        """Add a request; return False if it was found there already."""
        before = self._found.get(request_id)
        if before == instance_id:
            return False
        if before is not None:
            self._on[before].discard(request_id)
        self._found[request_id] = instance_id
        self._on.setdefault(instance_id, set()).add(request_id)
        return True

    def keep(self, instance_id: str, is_there: Callable[[str], bool]) -> None:
        """Remove the requests that have left an instance."""
        on_it = self._on.get(instance_id)
        if on_it:
            for request_id in [name for name in on_it if not is_there(name)]:
                on_it.discard(request_id)
                del self._found[request_id]

    def keep_instances(self, is_known: Callable[[str], bool]) -> None:
        """Remove the requests of instances that have left the cluster."""
        for instance_id in [name for name in self._on if not is_known(name)]:
            for request_id in self._on.pop(instance_id):
                del self._found[request_id]

    def clear(self) -> None:
        """Remove all."""
        self._found.clear()
        self._on.clear()
