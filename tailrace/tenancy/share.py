"""The tenant and weight that travel with a request.

vLLM's API server puts them among the request's trace headers; of a client's own headers it accepts only
`traceparent` and `tracestate` there.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Self

from tailrace.tenancy.keys import MAX_WEIGHT, MIN_WEIGHT

SHARE_HEADER: Final = "tailrace-tenant"


class Share(NamedTuple):
    """A tenant's name and weight; the default for requests without a tenant."""

    tenant: str = ""
    weight: float = 1.0

    def encode(self) -> str:
        """Return the header's value."""
        return f"{self.weight!r} {self.tenant}"

    @classmethod
    def decode(cls, value: str) -> Self:
        """Parse a header's value; return the default if it is invalid."""
        weight, space, tenant = value.partition(" ")
        try:
            share = cls(tenant, float(weight))
        except ValueError:
            return cls()
        return share if space and MIN_WEIGHT <= share.weight <= MAX_WEIGHT else cls()
