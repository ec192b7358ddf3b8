"""How the parts of a front end send to workers, whatever carries it."""

from __future__ import annotations

from typing import Protocol

from tailrace.v1 import worker_pb2


class Outbox(Protocol):
    """Messages to attached workers."""

    def send(self, instance_id: str, message: worker_pb2.AttachUp) -> bool:
        """Queue a message; False when the instance is not attached, and the message is dropped."""

    def attached(self) -> list[str]:
        """Instances that answer now."""


def abort(handles: list[int]) -> worker_pb2.AttachUp:
    """Free these requests."""
    return worker_pb2.AttachUp(abort=worker_pb2.Abort(handles=handles))
