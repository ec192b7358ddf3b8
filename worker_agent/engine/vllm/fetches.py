"""Blocks that come from another worker into the prefix cache. Engine thread, but for writing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from worker_agent.engine.base import Submission
from worker_agent.engine.errors import EngineRefusal, NoRoom
from worker_agent.engine.vllm.in_use import InUse
from worker_agent.engine.vllm.kv_blocks import DeviceStaging
from worker_agent.engine.vllm.load import LoadedCore


@dataclass(slots=True)
class Fetch:
    """One prompt's. `blocks`: the first `held` were here, the others come; all have one user more for it."""

    request: Request
    held: int
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
        """Check received blocks and write them. Any thread, inside `writing`. Raises EngineRefusal, and
        KvCorrupt having written nothing."""
        places = self._places(first_block, num_blocks)
        core.kv.verify(received, checksums, first_block)
        core.kv.scatter(received, places)
        self.written.update(range(first_block, first_block + num_blocks))

    @contextmanager
    def receiving(self, first_block: int, num_blocks: int) -> Iterator[list[int]]:
        """While the engine's ranks write these blocks: their places. Raises EngineRefusal."""
        with self.writing:
            yield self._places(first_block, num_blocks)
            self.written.update(range(first_block, first_block + num_blocks))

    def _places(self, first_block: int, num_blocks: int) -> list[int]:
        first = self.held + first_block
        places = [block.block_id for block in self.blocks[first : first + num_blocks]]
        if len(places) != num_blocks:
            raise EngineRefusal(f"blocks {first_block}..{first_block + num_blocks - 1} do not come")
        return places


class Fetches:
    """All fetches of this engine, by name."""

    def __init__(self, core: LoadedCore, post: Callable[[Callable[[], None]], None]) -> None:
        """`post` runs a command on the engine thread, from any thread."""
        self._core = core
        self._post = post
        self._fetches: dict[str, Fetch] = {}

    def find(self, fetch_id: str) -> Fetch | None:
        """The open fetch. Any thread."""
        return self._fetches.get(fetch_id)

    def lacks(self, submission: Submission) -> list[bytes]:
        """Names of the prompt's blocks that the cache lacks, from the first on. Raises EngineRefusal."""
        _, held, names = self._found(submission, None)
        return names[len(held) :]

    def open(self, fetch_id: str, submission: Submission, most_tokens: int) -> list[bytes]:
        """Set blocks aside for what the cache lacks of the request's first `most_tokens`; keep what it has.

        Returns the names of those that are to come; nothing is set aside when there are none, or host memory
        has all of them, from where they come when the request is admitted. Raises
        EngineRefusal for a request or a layout for which nothing can come, NoRoom.
        """
        core = self._core
        request, held, names = self._found(submission, most_tokens // core.block_tokens)
        lacking = names[len(held) :]
        if len(core.host.find(lacking)) == len(lacking):
            return []
        # Those that nobody uses are free, too, until they are kept.
        room = (
            core.block_pool.get_num_free_blocks()
            - core.promised_blocks
            - sum(not block.ref_cnt for block in held)
        )
        if len(lacking) > room:
            raise NoRoom(f"no room: {len(lacking)} KV blocks are not free")
        core.block_pool.touch(held)
        coming = core.take(len(lacking))
        self._fetches[fetch_id] = Fetch(request, len(held), [*held, *coming], InUse(fetch_id))
        return lacking

    def keep(self, fetch_id: str, blocks: int) -> None:
        """The first `blocks` have come: the prefix cache has them from now on, as free blocks. Raises
        EngineRefusal."""
        found = self._fetches.get(fetch_id)
        if found is None or not found.written.issuperset(range(blocks)):
            raise EngineRefusal(f"{fetch_id}: its blocks have not arrived")
        main = self._core.layout.main
        assert main is not None
        self._core.block_pool.cache_full_blocks(
            request=found.request,
            blocks=found.blocks,
            num_cached_blocks=found.held,
            num_full_blocks=found.held + blocks,
            block_size=self._core.block_tokens,
            kv_cache_group_id=main,
        )

    def drop(self, fetch_id: str) -> None:
        """Free its blocks once nobody writes them any more; those that have no name by then are lost.

        An unknown fetch is ignored.
        """
        found = self._fetches.pop(fetch_id, None)
        if found is None:
            return

        def free() -> None:
            self._core.block_pool.free_blocks(reversed(found.blocks))

        found.writing.close(lambda: self._post(free))

    def _found(
        self, submission: Submission, most_blocks: int | None
    ) -> tuple[Request, list[KVCacheBlock], list[bytes]]:
        """The request, its leading blocks that are here, and the names of all, of so many at most."""
        request = self._request(submission)
        # The last token is computed, whatever is here.
        blocks = (request.num_tokens - 1) // self._core.block_tokens
        if most_blocks is not None:
            blocks = min(blocks, most_blocks)
        names = [bytes(name) for name in request.block_hashes[:blocks]]
        return request, self._core.cached(names), names

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
