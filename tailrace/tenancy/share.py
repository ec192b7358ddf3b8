"""Whose a request is, and the tenant's weight, as they travel with the request.

vLLM's API server puts them among the request's trace headers, of which a client's own are `traceparent` and
`tracestate` alone.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Self

from tailrace.tenancy.book import LARGEST_WEIGHT, SMALLEST_WEIGHT

SHARE_HEADER: Final = "tailrace-tenant"


class Share(NamedTuple):
    """A tenant's name and weight; nobody's request has neither."""

    tenant: str = ""
    weight: float = 1.0

    def encode(self) -> str:
        """As the header's value."""
        return f"{self.weight!r} {self.tenant}"

    @classmethod
    def decode(cls, value: str) -> Self:
        """Of a header's value; what is none is nobody's."""
        weight, space, tenant = value.partition(" ")
        try:
            share = cls(tenant, float(weight))
        except ValueError:
            return cls()
        return share if space and SMALLEST_WEIGHT <= share.weight <= LARGEST_WEIGHT else cls()
