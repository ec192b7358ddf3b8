"""The requests that this worker carries, by the front ends' names for them."""

from __future__ import annotations

from dataclasses import dataclass

from worker_agent.engine.base import RequestKey


@dataclass(frozen=True, slots=True)
class Carried:
    """What outlives the engine's own memory of a request: who it was."""

    request_id: str
    frontend_id: str
    epoch: int


class CarriedRequests:
    """From submission or adoption until its end here. Touched once or twice in a request's life."""

    def __init__(self) -> None:
        self._by_key: dict[RequestKey, Carried] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, key: RequestKey, carried: Carried) -> None:
        """It is here now."""
        self._by_key[key] = carried

    def get(self, key: RequestKey) -> Carried | None:
        """Who that is."""
        return self._by_key.get(key)

    def remove(self, key: RequestKey) -> Carried | None:
        """It is here no more; who it was."""
        return self._by_key.pop(key, None)

    def remove_client(self, client: int) -> list[Carried]:
        """All of a front end whose stream ended."""
        keys = [key for key in self._by_key if key.client == client]
        return [self._by_key.pop(key) for key in keys]
