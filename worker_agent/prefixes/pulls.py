"""Requests whose prefix another worker holds: its blocks are fetched into the prefix cache first.

Then the engine gets the request, and finds them. Its other work goes on meanwhile. Whatever goes wrong, the
request is computed: a pull can be late, never wrong, since the engine looks by name for itself, and what came
was checked as in a migration. Requests that lack the same block wait for one pull.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tailrace.perf.transfer_rate import TransferRate
from tailrace.service.tasks import run_to_completion, task_error
from tailrace.v1 import cache_pb2
from worker_agent.engine.base import Engine, KvShape, Pull, RequestKey, Submission
from worker_agent.engine.errors import EngineRefusal, KvCorrupt
from worker_agent.faults import Faults
from worker_agent.kv.address import KvIdentityError, KvTransferError, addresses_of
from worker_agent.kv.ticket import Ticket
from worker_agent.metrics import WorkerMetrics
from worker_agent.migration.blocks import BlockPuller
from worker_agent.migration.messages import layout_difference
from worker_agent.migration.spans import TransferSpans
from worker_agent.prefixes.loan_link import LoanLink, LoanLost

log = logging.getLogger(__name__)

Connect = Callable[[str, cache_pb2.LendRequest, float], LoanLink]
"""Opens a loan at an address, for so many seconds at most."""


@dataclass(frozen=True, slots=True)
class PullParts:
    """Parts of the worker that pulls work with."""

    engine: Engine
    shape: KvShape
    puller: BlockPuller
    connect: Connect
    metrics: WorkerMetrics
    faults: Faults
    spans: TransferSpans
    incoming: TransferRate
    # Seconds after which a request is computed whatever has come.
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one ended. `word`: pulled, shared, held, gone, late, refused, lost, corrupt, none or busy."""

    word: str
    blocks: int = 0
    bytes: int = 0
    reason: str = ""


class Pulls:
    """All pulls of a worker, one task a request."""

    def __init__(self, parts: PullParts) -> None:
        self._parts = parts
        self._running: dict[RequestKey, asyncio.Task[None]] = {}
        # The end of the pull that brings a block, by the name of the first one that it brings.
        self._coming: dict[bytes, asyncio.Event] = {}
        # Pulls that have not been told yet what they are to bring.
        self._opening: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        """Requests that wait for their prefix."""
        return len(self._running)

    def submit(self, submission: Submission) -> None:
        """Engine.submit, once the engine has what another worker holds."""
        # An older epoch of it may still wait.
        self.drop([submission.key])
        if submission.pull is None and not (self._coming or self._opening):
            self._parts.engine.submit(submission)
            return
        task = asyncio.create_task(self._run(submission), name=f"pull for {submission.request_id}")
        self._running[submission.key] = task
        if submission.pull is not None:
            self._opening.add(task)
        task.add_done_callback(lambda done: self._done(submission, done))

    def concerns(self, key: RequestKey) -> bool:
        """Whether this request waits for its prefix, and will be the engine's."""
        return key in self._running

    def drop(self, keys: Sequence[RequestKey]) -> None:
        """These are not to be run any more: aborted, or submitted anew."""
        for key in keys:
            task = self._running.pop(key, None)
            if task is not None:
                task.cancel()

    def drop_client(self, client: int) -> None:
        """Nor is any of this front end's."""
        self.drop([key for key in self._running if key.client == client])

    async def close(self) -> None:
        """End all; what waits is not run."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- one pull

    async def bring(self, submission: Submission) -> Outcome:
        """Have a prompt's prefix come into the cache, and no more: the engine does not get the request.

        Requests that lack the same blocks meanwhile wait for it.
        """
        return await self._attempt(submission)

    async def _run(self, submission: Submission) -> None:
        began_s = time.monotonic()
        outcome = await self._attempt(submission)
        if submission.pull is not None or outcome.word == "shared":
            self._note(submission, outcome, began_s)
        # From here on it is the engine's: an abort that comes now finds it there.
        self._running.pop(submission.key, None)
        self._parts.engine.submit(submission)

    async def _attempt(self, submission: Submission) -> Outcome:
        try:
            async with asyncio.timeout(self._parts.timeout_s):
                return await self._pull(submission)
        except TimeoutError:
            return Outcome("late", reason=f"did not arrive within {self._parts.timeout_s:g} s")
        except EngineRefusal as error:
            return Outcome("refused", reason=str(error))
        except KvIdentityError as error:
            self._parts.metrics.kv_identity_failures += 1
            return Outcome("lost", reason=str(error))
        except (LoanLost, KvTransferError) as error:
            self._parts.metrics.kv_transfer_failures += isinstance(error, KvTransferError)
            return Outcome("lost", reason=str(error))
        except KvCorrupt as error:
            self._parts.metrics.kv_checksum_failures += 1
            return Outcome("corrupt", reason=str(error))

    def _note(self, submission: Submission, outcome: Outcome, began_s: float) -> None:
        holder = "" if submission.pull is None else submission.pull.instance_id
        self._parts.metrics.pulls[outcome.word] += 1
        self._parts.metrics.pulled_tokens += outcome.blocks * self._parts.shape.block_tokens
        if outcome.reason:
            log.info("%s is computed: no prefix from %s: %s", submission.request_id, holder, outcome.reason)
        ended_s, came = time.monotonic(), (outcome.blocks, outcome.bytes)
        self._parts.spans.pulled(submission.traceparent, began_s, ended_s, holder, outcome.word, *came)

    async def _pull(self, submission: Submission) -> Outcome:
        pull = submission.pull
        return await (self._wait_for_others(submission) if pull is None else self._own(submission, pull))

    async def _wait_for_others(self, submission: Submission) -> Outcome:
        """One that has nobody to pull from waits for what comes for others."""
        waited = False
        while True:
            # The engine answers in the order in which it is asked: whoever came after a pull finds it.
            names = await run_to_completion(self._parts.engine.fetch_missing(submission))
            self._opening -= {asyncio.current_task()}
            coming = self._coming.get(names[0]) if names else None
            if coming is None:
                return Outcome("shared" if waited else "none")
            waited = True
            await coming.wait()

    async def _own(self, submission: Submission, pull: Pull) -> Outcome:
        engine, waited = self._parts.engine, False
        while True:
            fetch_id = f"fetch {next(self._numbers)}"
            try:
                names = await run_to_completion(engine.fetch_open(fetch_id, submission, pull.tokens))
                self._opening -= {asyncio.current_task()}
                if not names:
                    return Outcome("shared" if waited else "held")
                coming = self._coming.get(names[0])
                if coming is None:
                    return await self._first(fetch_id, names, pull)
            finally:
                await run_to_completion(engine.fetch_drop(fetch_id))
            # What it brings is looked for; what it does not, is pulled.
            waited = True
            await coming.wait()

    async def _first(self, fetch_id: str, names: list[bytes], pull: Pull) -> Outcome:
        """The only one under way that brings this block."""
        ended = self._coming[names[0]] = asyncio.Event()
        try:
            return await self._fetch(fetch_id, names, pull)
        finally:
            del self._coming[names[0]]
            ended.set()

    async def _fetch(self, fetch_id: str, names: list[bytes], pull: Pull) -> Outcome:
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
                return Outcome("gone", reason="the holder no longer has any of it")
            began_s = time.monotonic()
            size = await self._transfer(fetch_id, names[:count], lent)
            parts.incoming.add(size, time.monotonic() - began_s)
            await run_to_completion(parts.engine.fetch_keep(fetch_id, count))
            return Outcome("pulled", count, size)
        finally:
            loan.close()

    async def _transfer(self, fetch_id: str, names: list[bytes], lent: cache_pb2.Lent) -> int:
        """Bytes that came. Raises KvTransferError, KvIdentityError, KvCorrupt, EngineRefusal."""
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
            # A mistake of ours; the request has no part in it.
            log.error("a pull failed", exc_info=error)
            if known:
                self._parts.engine.submit(submission)
