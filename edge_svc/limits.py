"""Limits of what an edge sends to vLLM's Rust API server, which knows no tenants.

A request is open from Envoy's first question about it until Envoy says that it has ended, by a line in its
access log (ends.py), whatever became of it. Meanwhile it holds what it was given.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from edge_svc.configuration import Bounds
from tailrace.tenancy.body import LARGE_BODY_BYTES, refuse
from tailrace.tenancy.demand import Demand
from tailrace.tenancy.keys import Tenant
from tailrace.tenancy.meter import MAX_ARRIVING, Bodies, Body, Meter
from tailrace.tenancy.pace import Pace

# A client that has read the end of an answer may send the next request before Envoy's line about it is read.
# So long, so many requests of a tenant that is at its limit wait for one of its others to end.
_END_S: Final = 0.1
_MAX_WAITING: Final = 4
# Ended requests that are remembered, since a question about one that was cancelled may still come.
_MAX_ENDED: Final = 16_384
# Seconds of a front end's event loop for placing a sequence and forwarding a token, and of vllm-rs for a byte
# of text, roughly: the busiest parts of a request's way.
_SEQUENCE_S: Final = 6e-4
_TEXT_BYTE_S: Final = 1e-8
# Of the edge for a byte of a body, roughly.
_BODY_BYTE_S: Final = 2e-9
# As front ends charge a prompt that is refused once it is tokenized.
_BYTES_PER_TOKEN: Final = 4


@dataclass(slots=True, eq=False)
class Open:
    """A request that has not ended."""

    tenant: Tenant | None
    body: Body
    # Sequences that count.
    sequences: int = 0
    # Tokens that nobody else counts, and those that count only if vLLM refuses the request.
    tokens: int = 0
    tokens_if_refused: int = 0
    ended: bool = False


class Limits:
    """The open requests of one edge, and what their tenants have used."""

    def __init__(self, bounds: Bounds, has_tenants: bool) -> None:
        self._meter = Meter()
        self._bodies = Bodies(bounds.max_bodies_bytes, MAX_ARRIVING, has_tenants)
        self._open: dict[str, Open] = {}
        # In the order of their ends.
        self._ended: dict[str, None] = {}
        # Set at the next end.
        self._end = asyncio.Event()
        self._waiting: Counter[str] = Counter()
        self._pace = Pace()

    @property
    def opened(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._open)

    def open(self, ticket: str, tenant: Tenant | None) -> Open:
        """Return the request that Envoy knows by this ticket."""
        found = self._open.get(ticket)
        if found is None:
            found = Open(tenant, self._bodies.open("" if tenant is None else tenant.name))
            if ticket in self._ended:
                found.ended = True
                found.body.close()
            else:
                self._open[ticket] = found
        return found

    async def check(self, request: Open, announced: int) -> None:
        """Refuse a request before its body of `announced` bytes is read if it cannot be admitted later; 0:
        that is not known. Raise LimitRefusal."""
        tenant = request.tenant
        if tenant is None:
            return
        await self._until_one_ends(tenant, 1)
        refuse(self._meter.refusal(tenant, time.monotonic()))
        refuse(request.body.grow(announced))
        refuse(request.body.begin_arriving())

    async def hold(self, request: Open, size: int) -> None:
        """Count the body of a request, which has arrived; a large one is read in its tenant's time, whatever
        becomes of it. Raise LimitRefusal."""
        request.body.end_arriving()
        refuse(request.body.grow(size))
        if request.tenant is not None and size > LARGE_BODY_BYTES:
            refuse(await self._pace.wait(request.tenant.name, _BODY_BYTE_S * size))

    async def begin(self, request: Open, demand: Demand, tokenizes: bool) -> None:
        """Count a request for vllm-rs until it ends, once others have their share. Raise LimitRefusal.

        `tokenizes`: whether it only has its text tokenized, which no front end counts.
        """
        sequences = demand.sequences
        tenant = request.tenant
        if tenant is None:
            return
        await self._until_one_ends(tenant, sequences)
        if request.ended:
            return
        cost_s = _SEQUENCE_S * sequences + _TEXT_BYTE_S * demand.tokenized_bytes + demand.loop_s
        refuse(await self._pace.wait(tenant.name, cost_s))
        if request.ended:
            return
        refuse(self._meter.begin(tenant, time.monotonic(), sequences))
        request.sequences = sequences
        tokens = demand.tokenized_bytes // _BYTES_PER_TOKEN
        request.tokens, request.tokens_if_refused = (tokens, 0) if tokenizes else (0, tokens)

    def charge(self, tenant: Tenant, tokens: int) -> None:
        """Charge what front ends say that a tenant has used."""
        self._meter.charge(tenant, tokens, time.monotonic())

    def end(self, ticket: str, status: int) -> None:
        """Give back what a request holds that has ended, with this HTTP status."""
        self._ended[ticket] = None
        if len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        request = self._open.pop(ticket, None)
        if request is None:
            return
        request.ended = True
        request.body.close()
        if request.tenant is None or not request.sequences:
            return
        self._meter.end(request.tenant, request.sequences)
        tokens = request.tokens + (request.tokens_if_refused if status == HTTPStatus.BAD_REQUEST else 0)
        if tokens:
            self.charge(request.tenant, tokens)
        self._end.set()
        self._end = asyncio.Event()

    async def _until_one_ends(self, tenant: Tenant, sequences: int) -> None:
        name = tenant.name
        if not self._is_busy(tenant, sequences) or self._waiting[name] >= _MAX_WAITING:
            return
        self._waiting[name] += 1
        try:
            async with asyncio.timeout(_END_S):
                while self._is_busy(tenant, sequences):
                    await self._end.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting[name] -= 1
            if not self._waiting[name]:
                del self._waiting[name]

    def _is_busy(self, tenant: Tenant, sequences: int) -> bool:
        most = tenant.concurrency
        return most >= sequences and self._meter.running(tenant) + sequences > most
