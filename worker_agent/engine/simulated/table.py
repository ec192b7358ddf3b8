"""All requests of an engine, by ID and by key."""

from __future__ import annotations

from collections.abc import Iterator

from worker_agent.engine.base import RequestKey
from worker_agent.engine.errors import Gone
from worker_agent.engine.simulated.request import Request


class RequestTable:
    """All requests that are not GONE."""

    def __init__(self) -> None:
        self._by_id: dict[str, Request] = {}
        self._by_key: dict[RequestKey, Request] = {}

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, request: Request) -> None:
        """Add a request whose ID and key are not in the table."""
        self._by_id[request.request_id] = request
        self._by_key[request.key] = request

    def remove(self, request: Request) -> None:
        """Remove a request, which must be in the table."""
        del self._by_id[request.request_id]
        del self._by_key[request.key]

    def by_key(self, key: RequestKey) -> Request | None:
        """Return the request with this key, or None."""
        return self._by_key.get(key)

    def by_id(self, request_id: str) -> Request | None:
        """Return the request with this ID, or None."""
        return self._by_id.get(request_id)

    def of_client(self, client: int) -> list[Request]:
        """Return all requests of a front end."""
        return [request for request in self._by_id.values() if request.key.client == client]

    def known(self, request_id: str) -> Request:
        """Return the request with this ID. Raise Gone if there is none."""
        request = self._by_id.get(request_id)
        if request is None:
            raise Gone(f"request {request_id} is not on this engine")
        return request
