"""Span and trace ids from the system's randomness. Imports the SDK, so only for processes that trace."""

from __future__ import annotations

import secrets

from opentelemetry.sdk.trace.id_generator import IdGenerator


class SystemIds(IdGenerator):  # type: ignore[misc]
    """Generate ids independent of Python's global random generator.

    The SDK's own generator uses that one, which vLLM seeds identically in every worker: workers gave the same
    ids to different spans of a trace, and all but one of these were lost.
    """

    def generate_span_id(self) -> int:
        """Return 64 random bits, not zero."""
        return secrets.randbits(64) or 1

    def generate_trace_id(self) -> int:
        """Return 128 random bits, not zero."""
        return secrets.randbits(128) or 1

    def is_trace_id_random(self) -> bool:
        """Return True: all bits are random."""
        return True
