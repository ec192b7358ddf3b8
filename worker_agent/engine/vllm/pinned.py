"""Blocks that must not be freed meanwhile: pinned and lent ones, which another worker reads, and those of
prefixes fetched from another worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from worker_agent.engine.base import Submission
from worker_agent.engine.errors import EngineRefusal, NoRoom
from worker_agent.engine.vllm.host_pool import HostSlot
from worker_agent.engine.vllm.kv_blocks import DeviceStaging
from worker_agent.engine.vllm.load import LoadedCore


class InUse:
    """Context manager around each copy; `close` refuses new copies and reports when the last has ended."""

    def __init__(self, subject: str) -> None:
        """`subject` is named in the refusal, as in "SUBJECT has ended"."""
        self._subject = subject
        self._lock = threading.Lock()
        self._users = 0
        self._when_idle: Callable[[], None] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._when_idle is not None:
                raise EngineRefusal(f"{self._subject} has ended")
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            done = self._when_idle if self._users == 0 else None
        if done is not None:
            done()

    def close(self, when_idle: Callable[[], None]) -> None:
        """Call `when_idle` once no copy is in progress: now, or on the thread whose copy ends last."""
        with self._lock:
            if self._when_idle is not None:
                return
            self._when_idle = when_idle
            idle = self._users == 0
        if idle:
            when_idle()


@dataclass(slots=True)
class Pinned:
    """Blocks in order; each has an extra user. The list only grows, so any thread may read it."""

    reading: InUse
    pinned: list[KVCacheBlock | HostSlot] = field(default_factory=list)

    def read(self, core: LoadedCore, first_block: int, num_blocks: int, out: DeviceStaging) -> list[int]:
        """Copy blocks to the front of `out` and return their checksums. Any thread, inside `reading`."""
        blocks = self._blocks(first_block, num_blocks)
        sums: list[int] = []
        for on_host, group in groupby(blocks, lambda block: isinstance(block, HostSlot)):
            places = [block.slot if isinstance(block, HostSlot) else block.block_id for block in group]
            part = out.part(len(sums), len(places))
            if on_host:
                assert core.host_pool is not None
                sums += core.host_pool.read(places, part)
            else:
                sums += core.kv.gather(places, part)
        return sums

    def block_ids(self, first_block: int, num_blocks: int) -> list[int]:
        """Return block IDs on an engine whose ranks read the blocks; such an engine has no host memory. Any
        thread."""
        blocks = self._blocks(first_block, num_blocks)
        return [block.block_id for block in blocks if not isinstance(block, HostSlot)]

    def _blocks(self, first_block: int, num_blocks: int) -> list[KVCacheBlock | HostSlot]:
        blocks = self.pinned[first_block : first_block + num_blocks]
        if len(blocks) != num_blocks:
            raise EngineRefusal(f"blocks {first_block}..{first_block + num_blocks - 1} are not all pinned")
        return blocks


# Blocks of the prefix cache, on the device or in host memory, that another worker copies.
#
# Engine thread, except for reading. vLLM names a block when the step that computes it is scheduled, so a loan
# opens only after the steps that were in flight at its request have ended.

OnOpened = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Opening:
    """A loan that waits for `steps`, those that were in flight when it was requested."""

    steps: Sequence[object]
    blocks: int
    done: OnOpened


class VllmLoans:
    """All loans of this engine, by ID."""

    def __init__(self, core: LoadedCore, post: Callable[[Callable[[], None]], None]) -> None:
        """`post` runs a command on the engine thread, from any thread."""
        self._core = core
        self._post = post
        self._loans: dict[str, Pinned] = {}
        self._opening: list[_Opening] = []

    def find(self, loan_id: str) -> Pinned | None:
        """Return the open loan, or None. Any thread."""
        return self._loans.get(loan_id)

    def open(self, loan_id: str, names: Sequence[bytes], done: OnOpened) -> None:
        """Pin the blocks with these names, up to the first missing one; call `done` with their number once
        they can be read. Raises EngineRefusal."""
        if loan_id in self._loans:
            raise EngineRefusal(f"{loan_id} is open")
        blocks = self._core.find_in_any_tier(names)
        self._core.pin(blocks)
        self._loans[loan_id] = Pinned(InUse(loan_id), blocks)
        self._opening.append(_Opening(self._steps(), len(blocks), done))
        self.on_step_end()

    def on_step_end(self) -> None:
        """Open the loans whose steps have ended."""
        if not self._opening:
            return
        opening, self._opening = self._opening, []
        in_flight = self._steps()
        for each in opening:
            if any(step is other for step in each.steps for other in in_flight):
                self._opening.append(each)
            else:
                each.done(each.blocks)

    def end(self, loan_id: str) -> None:
        """Free the blocks after the last read has ended; unknown loans are ignored."""
        loan = self._loans.pop(loan_id, None)
        if loan is None:
            return

        def free() -> None:
            self._core.unpin(loan.pinned)

        loan.reading.close(lambda: self._post(free))

    def _steps(self) -> list[object]:
        return [scheduled for _, scheduled, _ in self._core.core.batch_queue or ()]


@dataclass(slots=True)
class Fetch:
    """The fetch for one prompt. The first `cached` of its `blocks` were in the cache, the others are
    received; each has an extra user."""

    request: Request
    cached: int
    blocks: list[KVCacheBlock]
    writing: InUse
    written: set[int] = field(default_factory=set)

    def write(
        self,
        core: LoadedCore,
        first_block: int,
        num_blocks: int,
        received: DeviceStaging,
        checksums: Sequence[int],
    ) -> None:
        """Verify received blocks and write them. Any thread, inside `writing`. Raises EngineRefusal, or
        KvCorrupt without having written anything."""
        places = self._places(first_block, num_blocks)
        core.kv.verify(received, checksums, first_block)
        core.kv.scatter(received, places)
        self.written.update(range(first_block, first_block + num_blocks))

    @contextmanager
    def receiving(self, first_block: int, num_blocks: int) -> Iterator[list[int]]:
        """Context in which the engine's ranks write these blocks. Yields their IDs. Raises EngineRefusal."""
        with self.writing:
            yield self._places(first_block, num_blocks)
            self.written.update(range(first_block, first_block + num_blocks))

    def _places(self, first_block: int, num_blocks: int) -> list[int]:
        first = self.cached + first_block
        places = [block.block_id for block in self.blocks[first : first + num_blocks]]
        if len(places) != num_blocks:
            raise EngineRefusal(f"blocks {first_block}..{first_block + num_blocks - 1} do not come")
        return places


class Fetches:
    """All fetches of this engine, by ID."""

    def __init__(self, core: LoadedCore, post: Callable[[Callable[[], None]], None]) -> None:
        """`post` runs a command on the engine thread, from any thread."""
        self._core = core
        self._post = post
        self._fetches: dict[str, Fetch] = {}

    def find(self, fetch_id: str) -> Fetch | None:
        """Return the open fetch, or None. Any thread."""
        return self._fetches.get(fetch_id)

    def missing(self, submission: Submission) -> list[bytes]:
        """Return the names of the prompt's blocks after those in the cache. Raises EngineRefusal."""
        _, cached, names = self._look_up(submission, None)
        return names[len(cached) :]

    def open(self, fetch_id: str, submission: Submission, max_tokens: int) -> list[bytes]:
        """Pin the cached blocks of the request's first `max_tokens` and allocate blocks for the missing ones.

        Returns the names of the missing blocks. If there are none, or host memory has all of them and they
        are loaded when the request is admitted, allocates nothing and returns an empty list. Raises
        EngineRefusal if the request or the layout does not support fetching, NoRoom.
        """
        core = self._core
        request, cached, names = self._look_up(submission, max_tokens // core.block_tokens)
        missing = names[len(cached) :]
        if len(core.host.find(missing)) == len(missing):
            return []
        # Cached blocks without users count as free until they are pinned.
        room = (
            core.block_pool.get_num_free_blocks()
            - core.promised_blocks
            - sum(not block.ref_cnt for block in cached)
        )
        if len(missing) > room:
            raise NoRoom(f"no room: {len(missing)} KV blocks are not free")
        core.block_pool.touch(cached)
        try:
            allocated = core.allocate_blocks(len(missing))
        except Exception:
            core.block_pool.free_blocks(reversed(cached))
            raise
        self._fetches[fetch_id] = Fetch(request, len(cached), [*cached, *allocated], InUse(fetch_id))
        return missing

    def keep(self, fetch_id: str, blocks: int) -> None:
        """Add the first `blocks` received blocks to the prefix cache. Raises EngineRefusal if they have not
        all arrived."""
        found = self._fetches.get(fetch_id)
        if found is None or not found.written.issuperset(range(blocks)):
            raise EngineRefusal(f"{fetch_id}: its blocks have not arrived")
        main = self._core.layout.main
        assert main is not None
        self._core.block_pool.cache_full_blocks(
            request=found.request,
            blocks=found.blocks,
            num_cached_blocks=found.cached,
            num_full_blocks=found.cached + blocks,
            block_size=self._core.block_tokens,
            kv_cache_group_id=main,
        )

    def drop(self, fetch_id: str) -> None:
        """Free the blocks after the last write has ended; those not added to the cache by then are lost.

        Unknown fetches are ignored.
        """
        found = self._fetches.pop(fetch_id, None)
        if found is None:
            return

        def free() -> None:
            self._core.block_pool.free_blocks(reversed(found.blocks))

        found.writing.close(lambda: self._post(free))

    def _look_up(
        self, submission: Submission, max_blocks: int | None
    ) -> tuple[Request, list[KVCacheBlock], list[bytes]]:
        """Return the request, its first blocks that are cached, and the names of its first `max_blocks`."""
        request = self._request(submission)
        # The last token must always be computed.
        blocks = (request.num_tokens - 1) // self._core.block_tokens
        if max_blocks is not None:
            blocks = min(blocks, max_blocks)
        names = [bytes(name) for name in request.block_hashes[:blocks]]
        return request, self._core.find_on_device(names), names

    def _request(self, submission: Submission) -> Request:
        core = self._core
        if not core.layout.plain or not core.finds_by_name:
            raise EngineRefusal("its cache does not accept blocks from other instances")
        request = core.decode(submission.frames, submission.key.client, submission.adapter_version)
        if request.skip_reading_prefix_cache:
            raise EngineRefusal("the request must not read the cache")
        if submission.output_token_ids:
            request.append_output_token_ids(list(submission.output_token_ids))
        return request
