"""Prefix blocks lent to and fetched from other simulated engines.

As in vLLM, except that blocks in use have no name: only free blocks can be lent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from worker_agent.engine.base import Staging, Submission
from worker_agent.engine.errors import EngineRefusal, KvCorrupt, NoRoom
from worker_agent.engine.simulated.kv import BlockPool, KvCodec, seeds_of, staged_bytes
from worker_agent.engine.simulated.request import RequestReader


@dataclass(slots=True)
class _Fetch:
    """The fetch for one prompt: the first `cached` of these blocks were in the cache, the others are
    received."""

    names: list[bytes]
    cached: int
    blocks: list[int]
    # Received blocks, counted from 0 after the cached ones.
    written: set[int] = field(default_factory=set)


class Prefixes:
    """Loans and fetches of one engine, by ID; for the methods, see those of `Engine`."""

    def __init__(self, pool: BlockPool, reader: RequestReader, codec: KvCodec, prefix_caching: bool) -> None:
        self._pool = pool
        self._reader = reader
        self._codec = codec
        self._prefix_caching = prefix_caching
        self._loans: dict[str, tuple[list[bytes], list[int]]] = {}
        self._fetches: dict[str, _Fetch] = {}

    def has_loan(self, loan_id: str) -> bool:
        """Return whether this loan is open."""
        return loan_id in self._loans

    def has_fetch(self, fetch_id: str) -> bool:
        """Return whether this fetch is open."""
        return fetch_id in self._fetches

    # ---- lender

    def open_loan(self, loan_id: str, names: Sequence[bytes]) -> int:
        if loan_id in self._loans:
            raise EngineRefusal(f"{loan_id} is open")
        blocks: list[int] = []
        count = self._pool.take_named(blocks, names)
        self._loans[loan_id] = list(names[:count]), blocks
        return count

    def end_loan(self, loan_id: str) -> None:
        names, blocks = self._loans.pop(loan_id, ([], []))
        self._pool.release(blocks, names)

    def read(self, loan_id: str, first_block: int, num_blocks: int, out: Staging) -> list[int]:
        names, _ = self._loans[loan_id]
        requested = names[first_block : first_block + num_blocks]
        if first_block < 0 or num_blocks < 1 or len(requested) != num_blocks:
            raise EngineRefusal(f"blocks [{first_block}, {first_block + num_blocks}) of {len(names)} lent")
        data = staged_bytes(out.buffer, num_blocks * self._codec.block_bytes)
        return self._codec.write(seeds_of(requested), data)

    # ---- borrower

    def missing(self, submission: Submission) -> list[bytes]:
        names, blocks = self._names(submission, None), list[int]()
        cached = self._pool.take_named(blocks, names)
        self._pool.release(blocks, names[:cached])
        return names[cached:]

    def open_fetch(self, fetch_id: str, submission: Submission, max_tokens: int) -> list[bytes]:
        pool = self._pool
        names, blocks = self._names(submission, max_tokens // pool.block_tokens), list[int]()
        count, cached = len(names), pool.take_named(blocks, names)
        if cached == count or not pool.grow(blocks, count):
            pool.release(blocks, names[:cached])
            if cached == count:
                return []
            raise NoRoom(f"no room: {count - cached} KV blocks are not free")
        self._fetches[fetch_id] = _Fetch(names, cached, blocks)
        return names[cached:]

    def _names(self, submission: Submission, max_blocks: int | None) -> list[bytes]:
        """Return the names of the prompt's first `max_blocks`, without the last token, which must always be
        computed."""
        if not self._prefix_caching:
            raise EngineRefusal("its cache does not accept blocks from other instances")
        request = self._reader.read(
            submission.key, submission.epoch, submission.frames, submission.output_token_ids, "", ""
        )
        count = (request.total - 1) // self._pool.block_tokens
        return list(request.chain.full(0, count if max_blocks is None else min(count, max_blocks)))

    def write(
        self, fetch_id: str, first_block: int, num_blocks: int, received: Staging, checksums: Sequence[int]
    ) -> None:
        fetch = self._fetches[fetch_id]
        missing = fetch.names[fetch.cached :]
        names = missing[first_block : first_block + num_blocks]
        if len(names) != num_blocks:
            raise EngineRefusal(f"blocks {first_block}..{first_block + num_blocks - 1} do not come")
        if len(checksums) != num_blocks:
            raise KvCorrupt(f"{len(checksums)} checksums for {num_blocks} blocks")
        data = staged_bytes(received.buffer, num_blocks * self._codec.block_bytes)
        wrong = np.flatnonzero(self._codec.read(data, checksums, first_block) != seeds_of(names))
        if wrong.size:
            raise KvCorrupt(f"block {first_block + int(wrong[0])} does not match its name")
        fetch.written.update(range(first_block, first_block + num_blocks))

    def keep(self, fetch_id: str, blocks: int) -> None:
        fetch = self._fetches.get(fetch_id)
        if fetch is None or not fetch.written.issuperset(range(blocks)):
            raise EngineRefusal(f"{fetch_id}: its blocks have not arrived")
        count = fetch.cached + blocks
        kept, fetch.blocks = fetch.blocks[:count], fetch.blocks[count:]
        self._pool.release(kept, fetch.names[:count])
        fetch.names, fetch.cached = [], 0

    def drop_fetch(self, fetch_id: str) -> None:
        """Engine.fetch_drop; blocks that were cached before return to the cache."""
        fetch = self._fetches.pop(fetch_id, None)
        if fetch is not None:
            self._pool.release(fetch.blocks, fetch.names[: fetch.cached])
