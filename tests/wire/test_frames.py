"""Messages without frames, which only a broken peer sends."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from tailrace.wire.outputs import filter_outputs, read_outputs, split_outputs
from tailrace.wire.requests import Frames, read_abort, read_full_request, read_request, read_utility


@pytest.mark.parametrize(
    "read",
    [
        read_request,
        read_full_request,
        read_abort,
        read_utility,
        read_outputs,
        lambda frames: filter_outputs(frames, []),
        lambda frames: split_outputs(frames, []),
    ],
)
def test_message_without_frames_is_rejected(read: Callable[[Frames], object]) -> None:
    with pytest.raises(msgspec.DecodeError, match="no frames"):
        read([])
