"""How the parts of a front end send to workers, whatever carries it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from tailrace.v1 import worker_pb2

# What a Submit takes beside its frames and its tokens, at most: ids and numbers.
_SUBMIT_OVERHEAD_BYTES: Final = 2048
# A token id as a varint.
_TOKEN_BYTES: Final = 5


class Outbox(Protocol):
    """Messages to attached workers."""

    def send(self, instance_id: str, message: worker_pb2.AttachUp) -> bool:
        """Queue a message; False when the instance is not attached, and the message is dropped."""

    def attached(self) -> list[str]:
        """Instances that answer now."""

    def max_message_bytes(self, instance_id: str) -> int:
        """Largest message that the instance takes; 0 when it is not attached."""


def abort(handles: list[int]) -> worker_pb2.AttachUp:
    """Free these requests."""
    return worker_pb2.AttachUp(abort=worker_pb2.Abort(handles=handles))


def submit_bytes(submit: worker_pb2.Submit) -> int:
    """An upper bound of the message's size, without encoding it."""
    return request_bytes(submit.frames, len(submit.output_token_ids))


def request_bytes(frames: Sequence[bytes], output_tokens: int) -> int:
    """An upper bound of the size of the Submit of such a request."""
    return sum(map(len, frames)) + _TOKEN_BYTES * output_tokens + _SUBMIT_OVERHEAD_BYTES
