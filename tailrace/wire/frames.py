"""The frames of one message: msgpack first, then the auxiliary buffers that it refers to by index."""

from __future__ import annotations

from collections.abc import Sequence

Frames = Sequence[bytes]
"""Frame 0 is msgpack. An array of 256 bytes or more is in it as (dtype, shape, i), its bytes in frame i."""
