"""Span and trace ids from the system's randomness. Imports the SDK: for processes that trace."""

from __future__ import annotations

import secrets

from opentelemetry.sdk.trace.id_generator import IdGenerator


class SystemIds(IdGenerator):  # type: ignore[misc]
    """The SDK's own draws from Python's global generator, which vLLM seeds alike in every worker.

    Workers then gave the same ids to different spans of one trace, of which all but one were lost.
    """

    def generate_span_id(self) -> int:
        """64 bits, not zero."""
        return secrets.randbits(64) or 1

    def generate_trace_id(self) -> int:
        """128 bits, not zero."""
        return secrets.randbits(128) or 1

    def is_trace_id_random(self) -> bool:
        """They are, in every bit."""
        return True
