"""The API server's names of its requests, where the fleet knows them by other ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tailrace.wire import rename_outputs


class NamedOutput:
    """Send outputs to the API server under its own names of the requests.

    vLLM's Python API server already uses the fleet's ids (frontend_svc/api_server/engine_client.py), so there
    is nothing to do; vLLM's Rust API server puts what a client chose into the ids that it sends.
    """

    def __init__(self, send: Callable[[Sequence[bytes]], None], unread_bytes: Callable[[], int]) -> None:
        """`send` sends one message of vLLM's engine-core protocol."""
        self._send = send
        self._unread_bytes = unread_bytes
        self._names: dict[str, str] = {}

    @property
    def unread_bytes(self) -> int:
        """Return how many bytes wait for the API server."""
        return self._unread_bytes()

    def add(self, request_id: str, name: str) -> None:
        """Call a request by this name until its last output has been sent."""
        self._names[request_id] = name

    def drop(self, request_id: str) -> None:
        """Forget the name of a request that gets no more outputs."""
        self._names.pop(request_id, None)

    def send(self, frames: Sequence[bytes]) -> None:
        """Send one message. Raise msgspec.DecodeError if there are names and it is not readable."""
        self._send(rename_outputs(frames, self._names) if self._names else frames)
