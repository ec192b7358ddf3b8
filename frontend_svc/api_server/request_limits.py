"""ASGI middleware for vLLM's Python app: a bound on everything that a request's body asks for, before it
costs anything.

With and without keys. A body is counted while it arrives, read before the app sees it, and judged by what it
asks for (tailrace/tenancy/body.py); large requests then wait for their turn (large_lane.py). What a request
has used is charged to its tenant when it ends, however it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, ClassVar, Final

from frontend_svc.api_server.edge import content_type, may_be_json
from frontend_svc.api_server.large_lane import (
    LARGE_BYTES,
    LARGE_LOOP_S,
    REQUEST_LOOP_S,
    Doors,
    LaneTurn,
    LargeLane,
    Pass,
    large_task,
)
from frontend_svc.api_server.middleware import (
    HttpMiddleware,
    Message,
    Receive,
    Send,
    headers_of,
    is_open,
    send_error,
)
from frontend_svc.api_server.spec import BodyLimits
from frontend_svc.api_server.tenants import TenantAdmission, Tenants, replay_body, tenant_of_call
from tailrace.tenancy.body import (
    DEFAULT_MAX_TEXT_BYTES,
    URLENCODED,
    LimitRefusal,
    judge,
    refuse,
    too_many_sequences,
)
from tailrace.tenancy.demand import Demand
from tailrace.tenancy.fair_queue import TenantQueueFull
from tailrace.tenancy.keys import Tenant
from tailrace.tenancy.meter import MAX_ARRIVING, Bodies, Body

# A body may take another second for each of so many bytes.
_BYTES_PER_S: Final = 256 << 10
# A form without files: starlette reads it on the event loop, a megabyte in a fifth of a second.
_MAX_URLENCODED_BYTES: Final = 64 << 10
# Longest wait for a large request's turn: of hundreds that come at once, the last may go on.
_TURN_S: Final = 120.0


@dataclass(slots=True, eq=False)
class Account:
    """What one HTTP request has reserved and used. All of it is settled by `close`."""

    tenant: Tenant | None
    tenants: Tenants | None
    max_sequences: int
    body: Body
    # A large request's, and a small one's.
    turn: LaneTurn | None = None
    entry: Pass | None = None
    # Sequences that count, and that were begun.
    reserved: int = 0
    begun: int = 0
    # Those of them that the engine has.
    sent: int = 0
    # Whether what is begun are the steps of a beam search.
    beams: bool = False
    # Tokens of prompts that were tokenized, and of those that were submitted to the engine.
    tokenized: int = 0
    submitted: int = 0
    # vLLM's states of the engine's requests, which know how many tokens were made, and of earlier ones.
    states: list[Any] = field(default_factory=list)
    generated: int = 0
    # Tokens that an earlier run of a kept answer made; they are not charged again.
    replayed: int = 0
    # Whether an earlier run of a kept answer was charged for the prompt.
    rerun: bool = False
    # Whether the engine's requests were refused, so that nothing was computed.
    refused: bool = False
    # Of its images together; for media.py.
    pixels: int = 0
    # The fleet's id of the first of the engine's requests; empty before there is one.
    request_id: str = ""
    _closed: bool = False

    def reserve(self, sequences: int) -> None:
        """Count sequences, up to `sequences` in all, until the request ends. Raise LimitRefusal."""
        more = sequences - self.reserved
        if more <= 0:
            return
        if sequences > self.max_sequences:
            raise too_many_sequences(self.max_sequences)
        if self.tenant is not None and self.tenants is not None:
            refuse(self.tenants.meter.begin(self.tenant, self.tenants.now_s(), more))
        self.reserved += more

    def submit(self, sequences: int, prompt_tokens: int) -> None:
        """Count a prompt that goes to the engine. Raise LimitRefusal."""
        if not self.beams:
            self.begun += sequences
            self.reserve(self.begun)
        self.submitted += prompt_tokens

    async def step(self) -> None:
        """Wait until the next prompt or sequence may be submitted."""
        if self.turn is not None and not self.beams:
            await self.turn.step()

    def count_sent(self) -> None:
        """Count a sequence that the engine has; the last one ends the turn."""
        self.sent += 1
        if self.beams or self.sent >= self.begun:
            self.end_turn()

    def watch(self, state: Any) -> None:
        """Count the tokens of an engine's request, which has this state."""
        if len(self.states) >= 2 * self.max_sequences:
            # A beam search submits a request for each token.
            self.generated += sum(map(_output_tokens, self.states))
            self.states.clear()
        self.states.append(state)

    def end_turn(self) -> None:
        """Let the next request enter."""
        if self.turn is not None:
            self.turn.end()
        if self.entry is not None:
            self.entry.give_back()

    def close(self) -> None:
        """Give back what is reserved, and charge what was used."""
        if self._closed:
            return
        self._closed = True
        self.end_turn()
        self.body.close()
        if self.tenant is None or self.tenants is None:
            return
        if self.reserved:
            self.tenants.meter.end(self.tenant, self.reserved)
        generated = self.generated + sum(map(_output_tokens, self.states))
        prompts = 0 if self.refused and not generated else max(self.tokenized, self.submitted)
        if self.rerun:
            prompts = 0
        charged = prompts + max(0, generated - self.replayed)
        if charged:
            self.tenants.meter.charge(self.tenant, charged, self.tenants.now_s())


def _output_tokens(state: Any) -> int:
    """Return how many tokens vLLM has received for an engine's request."""
    return 0 if state.detokenizer is None else int(state.detokenizer.num_output_tokens())


account_of_task: ContextVar[Account | None] = ContextVar("account_of_task", default=None)
"""The account of the HTTP request that the current task serves."""


class RequestLimits(HttpMiddleware):
    """Apply the limits; see the module. Goes inside what checks keys."""

    limits: ClassVar[BodyLimits] = BodyLimits(max_text_bytes=DEFAULT_MAX_TEXT_BYTES)
    # Whether the model takes images or other media, whose bytes are no text.
    takes_media: ClassVar[bool] = True
    bodies: ClassVar[Bodies] = Bodies(BodyLimits().max_bodies_bytes, MAX_ARRIVING, has_tenants=False)
    lane: ClassVar[LargeLane] = LargeLane()
    doors: ClassVar[Doors] = Doors()

    @classmethod
    def configure(cls, limits: BodyLimits, has_tenants: bool) -> None:
        """Set the limits of this process."""
        cls.limits = limits
        cls.bodies = Bodies(limits.max_bodies_bytes, MAX_ARRIVING, has_tenants)
        cls.lane = LargeLane()
        cls.doors = Doors()

    async def handle(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        announced = headers.get(b"content-length", b"")
        has_body = announced.strip() not in (b"", b"0") or b"transfer-encoding" in headers
        needs_no_key = is_open(scope)
        if has_body and needs_no_key:
            # Bodies of strangers would fill the ledger for those who have keys.
            message = "A request that needs no key, such as a probe, may have no body."
            await _send_refusal(send, LimitRefusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message))
            return
        if not has_body and (needs_no_key or scope["method"] != "POST"):
            await self._app(scope, receive, send)
            return
        tenant = tenant_of_call.get()
        name = "" if tenant is None else tenant.name
        account = Account(tenant, TenantAdmission.tenants, self.limits.max_sequences, self.bodies.open(name))
        try:
            try:
                admitted = await self._admit(account, scope, receive)
                if admitted is None:
                    return
                body, is_large = admitted
            except LimitRefusal as refused:
                await _send_refusal(send, refused)
                return
            if is_large:
                send = _ending_turn(account, send)
            tokens = (account_of_task.set(account), large_task.set(is_large))
            try:
                await self._app(scope, replay_body(body, receive), send)
            finally:
                account_of_task.reset(tokens[0])
                large_task.reset(tokens[1])
        finally:
            account.close()

    async def _admit(self, account: Account, scope: Message, receive: Receive) -> tuple[bytes, bool] | None:
        """Return the body, and whether the request is large, once it may go on; None if its client has gone.

        Raise LimitRefusal.
        """
        headers = headers_of(scope)
        tenant = account.tenant
        name, weight = ("", 1.0) if tenant is None else (tenant.name, tenant.weight)
        body = await self._read(account.body, name, headers, receive)
        if body is None:
            return None
        demand = self._judge(scope, body)
        models = () if tenant is None or _resumes(headers, body) else tenant.models
        if models and demand.model not in models:
            named = "one of its models" if demand.model is None else repr(demand.model)
            message = f"This key may use {', '.join(models)}, not {named}."
            raise LimitRefusal(HTTPStatus.FORBIDDEN, message)
        account.beams = demand.beams
        account.reserve(demand.sequences)
        is_large = demand.tokenized_bytes > LARGE_BYTES or demand.loop_s > LARGE_LOOP_S
        if is_large:

            async def enter() -> None:
                account.turn = await self.lane.enter(name, weight, REQUEST_LOOP_S + demand.loop_s)

            try:
                if not await _unless_gone(enter(), receive):
                    return None
            except TenantQueueFull:
                raise self._lane_full() from None
            except TimeoutError:
                message = f"This large request had no turn within {_TURN_S:g} s, as others were before it."
                raise LimitRefusal(HTTPStatus.TOO_MANY_REQUESTS, message, 1) from None
            return body, True
        self.lane.small_came()
        if tenant is not None:
            # Without keys, who sends a request is not known.
            account.entry = await self.doors.enter(name)
        return body, False

    def _judge(self, scope: Message, body: bytes) -> Demand:
        """Return what the body asks for. Raise LimitRefusal."""
        if not body or not may_be_json(scope):
            # Files: vLLM takes no prompt's text from a form but the hint for a transcription.
            if content_type(scope) == URLENCODED and len(body) > _MAX_URLENCODED_BYTES:
                raise _too_large(_MAX_URLENCODED_BYTES, f" as {URLENCODED}")
            return Demand(loop_s=1e-9 * len(body))
        limits = self.limits
        return judge(body, limits.max_text_bytes, limits.max_messages, limits.max_sequences, self.takes_media)

    def _lane_full(self) -> LimitRefusal:
        message = "Too many large requests of this client wait for their turn."
        return LimitRefusal(HTTPStatus.TOO_MANY_REQUESTS, message, 1)

    async def _read(
        self, held: Body, name: str, headers: dict[bytes, bytes], receive: Receive
    ) -> bytes | None:
        """Return the whole body; None if the client has gone. Raise LimitRefusal."""
        limits = self.limits
        most = (
            limits.max_body_bytes if self.takes_media else min(limits.max_body_bytes, limits.max_text_bytes)
        )
        length = headers.get(b"content-length", b"").strip()
        announced = int(length) if length.isdigit() else 0
        if announced > most:
            raise _too_large(most)
        if announced > LARGE_BYTES and self.lane.is_full(name):
            raise self._lane_full()
        refuse(held.grow(announced))
        allowed_s = limits.body_timeout_s
        began_s = asyncio.get_running_loop().time()
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(allowed_s) as deadline:
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    if size > most:
                        raise _too_large(most)
                    refuse(held.grow(size))
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
                    # One that is there at once, as small ones are, does not count.
                    refuse(held.begin_arriving())
                    deadline.reschedule(began_s + allowed_s + size / _BYTES_PER_S)
        except TimeoutError:
            message_text = (
                f"A request's body must arrive within {allowed_s:g} s and a second for each "
                f"{_BYTES_PER_S} bytes; {size} bytes have."
            )
            raise LimitRefusal(HTTPStatus.BAD_REQUEST, message_text) from None
        finally:
            held.end_arriving()


def _ending_turn(account: Account, send: Send) -> Send:
    """Return a send function that ends the request's turn: however slowly its client reads, others go on."""

    async def ending(message: Message) -> None:
        account.end_turn()
        await send(message)

    return ending


def _too_large(most: int, what: str = "") -> LimitRefusal:
    message = f"A request's body may have at most {most} bytes{what}."
    return LimitRefusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)


def _resumes(headers: dict[bytes, bytes], body: bytes) -> bool:
    """Return whether the request only says which answer to resume.

    Its model was checked when the answer was begun, and another tenant's answer is not found.
    """
    return not body and b"last-event-id" in headers


async def _unless_gone(entering: Awaitable[None], receive: Receive) -> bool:
    """Wait for it; return False if the client goes away first. `receive`: what follows the body.

    Raise what it raises, or TimeoutError.
    """
    tasks = asyncio.ensure_future(entering), asyncio.ensure_future(receive())
    try:
        await asyncio.wait(tasks, timeout=_TURN_S, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
            return True
        if tasks[1].done():
            return False
        raise TimeoutError
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _send_refusal(send: Send, refused: LimitRefusal) -> None:
    await send_error(send, refused.status, refused.kind, refused.message, refused.headers)
