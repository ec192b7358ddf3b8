"""Blocks that another worker reads and that must not be freed meanwhile: pinned and lent ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from worker_agent.engine.errors import EngineRefusal
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
