"""Prefixes that workers lend each other: `Loans` is the holder's side, and `Pulls` fetches a prefix that
another worker holds into the prefix cache before the engine gets the request.

The engine's other work continues meanwhile. If anything goes wrong, the prefix is computed: a pull can cost
time but cannot cause a wrong answer, since the engine looks blocks up by name itself, and received blocks are
verified as in a migration. Requests that lack the same block wait for one pull.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import grpc

from tailrace.perf.transfer_rate import TransferRate
from tailrace.security.roles import Role
from tailrace.service.channels import Channels, decoded, format_error
from tailrace.service.tasks import cancel, run_to_completion, task_error
from tailrace.telemetry.incidents import loop_failed, loop_named
from tailrace.v1 import cache_pb2, cache_pb2_grpc
from worker_agent.engine.base import Engine, Frames, KvShape, Pull, RequestKey, Submission
from worker_agent.engine.errors import EngineRefusal, KvCorrupt
from worker_agent.faults import Faults
from worker_agent.kv.address import (
    BlockPuller,
    BlockSession,
    BlockSource,
    KvIdentityError,
    KvTransferError,
    Ticket,
    addresses_of,
    kv_layout,
    layout_difference,
)
from worker_agent.metrics import WorkerMetrics
from worker_agent.spans import TransferSpans

log = logging.getLogger(__name__)

# Maximum concurrent loans, each of which keeps blocks from being evicted.
_LOANS_MAX: Final = 16
# Maximum duration of a loan in seconds, even if the borrower's deadline is later.
LOAN_MAX_S: Final = 300.0


class LoanRefused(Exception):
    """The loan was refused; the message says why."""


class Loans:
    """All loans of a worker: another one may copy cached blocks while its Lend call lasts."""

    def __init__(self, engine: Engine, shape: KvShape, blocks: BlockSource, faults: Faults) -> None:
        self._engine = engine
        self._shape = shape
        self._blocks = blocks
        self._faults = faults
        self._numbers = itertools.count(1)
        self._open = 0

    @asynccontextmanager
    async def lend(self, request: cache_pb2.LendRequest) -> AsyncIterator[cache_pb2.Lent]:
        """Pin the leading blocks with these names, for reading by the requesting target only, until the
        context exits. Raise LoanRefused."""
        if self._open >= _LOANS_MAX:
            raise LoanRefused(f"{_LOANS_MAX} loans are open")
        loan_id = f"loan {next(self._numbers)}"
        session: BlockSession | None = None
        self._open += 1
        try:
            count = await run_to_completion(self._engine.loan_open(loan_id, list(request.names)))
            targets = addresses_of(request.kv_addresses, self._blocks.addresses)
            if count and targets:
                session = await self._blocks.open(loan_id, targets)
                await session.announce(0, request.names[:count])
            await self._faults.hold("lend:open")
            yield cache_pb2.Lent(
                layout=kv_layout(self._shape),
                blocks=0 if session is None else count,
                kv_addresses=[address.message() for address in self._blocks.addresses],
                kv_tickets=[] if session is None else [ticket.secret for ticket in session.tickets],
            )
        except (EngineRefusal, KvTransferError) as error:
            raise LoanRefused(str(error)) from error
        finally:
            self._open -= 1
            await run_to_completion(self._end(loan_id, session))

    async def _end(self, loan_id: str, session: BlockSession | None) -> None:
        try:
            if session is not None:
                await session.end()
        finally:
            await self._engine.loan_end(loan_id)


_LOOP: Final = loop_named("pulls")


class LoanLost(Exception):
    """The holder refused or ended the loan, or is lost; the message says why."""


class LoanLink:
    """One loan, from the borrower's side: a Lend call to the holder of a prefix."""

    def __init__(self, channel: grpc.aio.Channel, request: cache_pb2.LendRequest, timeout_s: float) -> None:
        """`timeout_s`: deadline of the whole loan, in seconds."""
        self._call = cache_pb2_grpc.CacheStub(channel).Lend(request, timeout=timeout_s)

    async def open(self) -> cache_pb2.Lent:
        """Return what is lent; it is valid until the link is closed. Raise LoanLost."""
        try:
            lent = await self._call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise LoanLost(format_error(error)) from error
        if not isinstance(lent, cache_pb2.Lent):
            raise LoanLost("the holder closed the loan")
        return lent

    def close(self) -> None:
        """End the loan; the blocks must not be read any more. Idempotent."""
        self._call.cancel()


Connect = Callable[[str, cache_pb2.LendRequest, float], LoanLink]
"""Opens a loan from a worker's address, with a timeout in seconds."""


@dataclass(frozen=True, slots=True)
class PullParts:
    """The parts of the worker that pulls use."""

    engine: Engine
    shape: KvShape
    puller: BlockPuller
    connect: Connect
    metrics: WorkerMetrics
    faults: Faults
    spans: TransferSpans
    incoming: TransferRate
    # Deadline of a pull in seconds; then the request is computed.
    timeout_s: float


@dataclass(frozen=True, slots=True)
class PullOutcome:
    """How a pull ended, one of PULL_OUTCOMES."""

    result: str
    blocks: int = 0
    bytes: int = 0
    reason: str = ""


class Pulls:
    """The pulls of a worker, one task per request."""

    def __init__(self, parts: PullParts) -> None:
        self._parts = parts
        self._running: dict[RequestKey, asyncio.Task[None]] = {}
        # Set at the end of a pull, by the name of the first block that it fetches.
        self._pending: dict[bytes, asyncio.Event] = {}
        # Pulls that do not know yet which blocks they have to fetch.
        self._opening: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        """Return the number of requests that wait for their prefix."""
        return len(self._running)

    def submit(self, submission: Submission) -> None:
        """Submit a request to the engine once its prefix was pulled."""
        # An older epoch of the request may still wait.
        self.drop([submission.key])
        if submission.pull is None and not (self._pending or self._opening):
            self._parts.engine.submit(submission)
            return
        task = asyncio.create_task(self._run(submission), name=f"pull for {submission.request_id}")
        self._running[submission.key] = task
        if submission.pull is not None:
            self._opening.add(task)
        task.add_done_callback(lambda done: self._done(submission, done))

    def concerns(self, key: RequestKey) -> bool:
        """Return whether this request waits for its prefix."""
        return key in self._running

    def drop(self, keys: Sequence[RequestKey]) -> None:
        """Drop requests that were aborted or submitted again."""
        for key in keys:
            task = self._running.pop(key, None)
            if task is not None:
                task.cancel()

    def drop_client(self, client: int) -> None:
        """Drop all requests of a front end."""
        self.drop([key for key in self._running if key.client == client])

    async def close(self) -> None:
        """Cancel all pulls; requests that wait are dropped."""
        await cancel(*self._running.values())

    # ---- one pull

    async def _run(self, submission: Submission) -> None:
        began_s = time.monotonic()
        outcome = await self.bring(submission)
        if submission.pull is not None or outcome.result == "shared":
            self._record(submission, outcome, began_s)
        # From here on the engine has the request, and an abort finds it there.
        self._running.pop(submission.key, None)
        self._parts.engine.submit(submission)

    async def bring(self, submission: Submission) -> PullOutcome:
        """Pull a prompt's prefix into the cache without submitting the request.

        Requests that lack the same blocks wait for this pull.
        """
        try:
            async with asyncio.timeout(self._parts.timeout_s):
                return await self._pull(submission)
        except TimeoutError:
            return PullOutcome("late", reason=f"did not arrive within {self._parts.timeout_s:g} s")
        except EngineRefusal as error:
            return PullOutcome("refused", reason=str(error))
        except KvIdentityError as error:
            self._parts.metrics.kv_identity_failures += 1
            return PullOutcome("lost", reason=str(error))
        except (LoanLost, KvTransferError) as error:
            self._parts.metrics.kv_transfer_failures += isinstance(error, KvTransferError)
            return PullOutcome("lost", reason=str(error))
        except KvCorrupt as error:
            self._parts.metrics.kv_checksum_failures += 1
            return PullOutcome("corrupt", reason=str(error))

    def _record(self, submission: Submission, outcome: PullOutcome, began_s: float) -> None:
        holder = "" if submission.pull is None else submission.pull.instance_id
        self._parts.metrics.pulls[outcome.result] += 1
        self._parts.metrics.pulled_tokens += outcome.blocks * self._parts.shape.block_tokens
        if outcome.reason:
            log.info("%s is computed: no prefix from %s: %s", submission.request_id, holder, outcome.reason)
        ended_s, size = time.monotonic(), (outcome.blocks, outcome.bytes)
        self._parts.spans.pulled(submission.traceparent, began_s, ended_s, holder, outcome.result, *size)

    async def _pull(self, submission: Submission) -> PullOutcome:
        pull = submission.pull
        return await (self._wait_for_others(submission) if pull is None else self._pull_own(submission, pull))

    async def _wait_for_others(self, submission: Submission) -> PullOutcome:
        """Wait for other requests' pulls that fetch this one's blocks."""
        waited = False
        while True:
            # The engine answers in order, so a request that follows a pull sees it here.
            names = await run_to_completion(self._parts.engine.fetch_missing(submission))
            self._opening -= {asyncio.current_task()}
            pending = self._pending.get(names[0]) if names else None
            if pending is None:
                return PullOutcome("shared" if waited else "none")
            waited = True
            await pending.wait()

    async def _pull_own(self, submission: Submission, pull: Pull) -> PullOutcome:
        engine, waited = self._parts.engine, False
        while True:
            fetch_id = f"fetch {next(self._numbers)}"
            try:
                names = await run_to_completion(engine.fetch_open(fetch_id, submission, pull.tokens))
                self._opening -= {asyncio.current_task()}
                if not names:
                    return PullOutcome("shared" if waited else "held")
                pending = self._pending.get(names[0])
                if pending is None:
                    return await self._pull_first(fetch_id, names, pull)
            finally:
                await run_to_completion(engine.fetch_drop(fetch_id))
            # Another pull fetches the first block: wait for it, then check again what is still missing.
            waited = True
            await pending.wait()

    async def _pull_first(self, fetch_id: str, names: list[bytes], pull: Pull) -> PullOutcome:
        """Run the pull that fetches this first block; others that need it wait."""
        ended = self._pending[names[0]] = asyncio.Event()
        try:
            return await self._fetch(fetch_id, names, pull)
        finally:
            del self._pending[names[0]]
            ended.set()

    async def _fetch(self, fetch_id: str, names: list[bytes], pull: Pull) -> PullOutcome:
        parts = self._parts
        request = cache_pb2.LendRequest(
            names=names, kv_addresses=[address.message() for address in parts.puller.addresses]
        )
        loan = parts.connect(pull.address, request, parts.timeout_s)
        try:
            lent = await loan.open()
            if difference := layout_difference(parts.shape, lent.layout):
                raise KvIdentityError(difference)
            count = min(lent.blocks, len(names))
            if not count:
                return PullOutcome("gone", reason="the holder no longer has any of it")
            began_s = time.monotonic()
            size = await self._transfer(fetch_id, names[:count], lent)
            parts.incoming.add(size, time.monotonic() - began_s)
            await run_to_completion(parts.engine.fetch_keep(fetch_id, count))
            return PullOutcome("pulled", count, size)
        finally:
            loan.close()

    async def _transfer(self, fetch_id: str, names: list[bytes], lent: cache_pb2.Lent) -> int:
        """Transfer the blocks; return the bytes received.

        Raise KvTransferError, KvIdentityError, KvCorrupt or EngineRefusal.
        """
        puller = self._parts.puller
        sources = addresses_of(lent.kv_addresses, puller.addresses)
        try:
            tickets = [Ticket(secret) for secret in lent.kv_tickets]
        except ValueError as error:
            raise KvTransferError(f"the holder gave no ticket: {error}") from error
        if not sources:
            raise KvTransferError(f"{len(lent.kv_addresses)} endpoints there, {len(puller.addresses)} here")
        transfer = await puller.connect(fetch_id, sources, tickets)
        try:
            await self._parts.faults.hold("pull:connected")
            return await transfer.pull(0, names)
        finally:
            await run_to_completion(transfer.close())

    def _done(self, submission: Submission, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        known = self._running.get(submission.key) is task
        if known:
            del self._running[submission.key]
        if (error := task_error(task)) is not None:
            # A bug in the pull must not affect the request.
            loop_failed(_LOOP, submission.request_id, error)
            if known:
                self._parts.engine.submit(submission)


# Copies of prefixes that the scheduler orders in advance: pulls for which no request waits.
#
# The holder sends the prompt of a request that begins with the prefix, and this engine computes the block
# names itself, as for a pull. A copy has the lowest priority: one at a time, and none while users' pulls or
# incoming migrations are in progress, or if there is no free room.

# Deadline for fetching a prompt, in seconds.
_PROMPT_S: Final = 2.0
# The key of a copy's submission, which belongs to no front end and is never submitted to the engine.
_NO_CLIENT: Final = RequestKey(0, 0)


class PromptUnknown(Exception):
    """The holder has no such request, or is gone; the message says why."""


async def prompt_of(channels: Channels, address: str, request_id: str) -> Frames:
    """Return a request as it was submitted to the worker at this address. Raise PromptUnknown."""
    stub = cache_pb2_grpc.CacheStub(channels.get(address, Role.WORKER))
    try:
        call = stub.Prompt(cache_pb2.PromptRequest(request_id=request_id), timeout=_PROMPT_S)
        reply = decoded(await call, address)
    except grpc.aio.AioRpcError as error:
        raise PromptUnknown(format_error(error)) from error
    return list(reply.frames)


class Copies:
    """The copies to this worker, at most one at a time."""

    def __init__(
        self,
        pulls: Pulls,
        prompt: Callable[[str, str], Awaitable[Frames]],
        importing: Callable[[], int],
        metrics: WorkerMetrics,
    ) -> None:
        """`prompt(address, request_id)`: as `prompt_of`; `importing()`: returns the number of open
        migrations to this worker."""
        self._pulls = pulls
        self._prompt = prompt
        self._importing = importing
        self._metrics = metrics
        self._copying = False

    async def copy(self, request: cache_pb2.CopyRequest) -> PullOutcome:
        """Copy the prefix into the cache and return the outcome. Cancelling ends the copy."""
        if self._copying or len(self._pulls) or self._importing():
            outcome = PullOutcome("busy", reason="another copy, or KV that users wait for, is in transit")
        else:
            self._copying = True
            try:
                outcome = await self._bring(request)
            finally:
                self._copying = False
        self._metrics.copies[outcome.result] += 1
        if outcome.reason:
            log.info("no copy of a prefix from %s: %s", request.holder_instance_id, outcome.reason)
        return outcome

    async def _bring(self, request: cache_pb2.CopyRequest) -> PullOutcome:
        try:
            frames = await self._prompt(request.holder_address, request.request_id)
        except PromptUnknown as error:
            return PullOutcome("gone", reason=str(error))
        holder = Pull(request.holder_instance_id, request.holder_address, request.tokens)
        return await self._pulls.bring(Submission(_NO_CLIENT, request.request_id, 0, frames, pull=holder))
