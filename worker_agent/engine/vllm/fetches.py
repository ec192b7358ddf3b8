"""Prefix cache blocks fetched from another worker. Engine thread, except for writing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from worker_agent.engine.base import Submission
from worker_agent.engine.errors import EngineRefusal, NoRoom
from worker_agent.engine.vllm.kv_blocks import DeviceStaging
from worker_agent.engine.vllm.load import LoadedCore
from worker_agent.engine.vllm.pinned import InUse


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
        allocated = core.allocate_blocks(len(missing))
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
