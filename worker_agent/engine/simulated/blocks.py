"""The pool of KV blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tailrace.cache.book import CacheBook
from tailrace.cache.names import short


class BlockPool:
    """Blocks 0..total-1, each free or in the list of one request.

    Free blocks that were released with a name keep their KV until they are needed for others, in the order of
    their release. Unlike in vLLM, blocks in use have no name, so requests do not share them.
    """

    __slots__ = ("_book", "_named", "_next_unused", "_returned", "block_tokens", "total")

    def __init__(self, total: int, block_tokens: int, book: CacheBook | None = None) -> None:
        """`book` records the names that are added and removed."""
        self.total = total
        self.block_tokens = block_tokens
        self._book = book
        self._named: OrderedDict[bytes, int] = OrderedDict()
        # Free blocks are the returned ones and those from _next_unused on, which have never been used. Not
        # listing the latter makes a hundred engines with a large GPU's memory each cheap until they are used.
        self._returned: list[int] = []
        self._next_unused = 0

    @property
    def free(self) -> int:
        """Return the number of free blocks."""
        return len(self._returned) + len(self._named) + self.total - self._next_unused

    @property
    def used(self) -> int:
        """Return the number of blocks in use."""
        return self._next_unused - len(self._returned) - len(self._named)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks for this many tokens."""
        return -(-tokens // self.block_tokens)

    def grow(self, held: list[int], blocks: int) -> bool:
        """Extend `held` to this many blocks. Return False and change nothing if too few are free."""
        missing = blocks - len(held)
        if missing > self.free:
            return False
        while missing > 0 and self._returned:
            held.append(self._returned.pop())
            missing -= 1
        if missing > 0:
            fresh = min(missing, self.total - self._next_unused)
            held.extend(range(self._next_unused, self._next_unused + fresh))
            self._next_unused += fresh
            evicted = [self._named.popitem(last=False) for _ in range(missing - fresh)]
            held.extend(block for _, block in evicted)
            self._record_change((), [name for name, _ in evicted])
        return True

    def take_named(self, held: list[int], names: Sequence[bytes]) -> int:
        """Move the free blocks with these names, up to the first missing one, to `held`, which is empty.
        Return their number."""
        for name in names:
            block = self._named.pop(name, None)
            if block is None:
                break
            held.append(block)
        self._record_change((), names[: len(held)])
        return len(held)

    def release(self, held: list[int], names: Sequence[bytes] = ()) -> None:
        """Free all blocks of `held`, the first ones with these names."""
        for block, name in reversed(list(zip(held, names, strict=False))):
            # Of two blocks with the same name, the older one loses it.
            older = self._named.pop(name, None)
            if older is not None:
                self._returned.append(older)
            self._named[name] = block
        self._record_change(names[: len(held)], ())
        self._returned += held[len(names) :]
        held.clear()

    def free_blocks(self) -> list[int]:
        """Return the numbers of all free blocks."""
        return [*self._returned, *self._named.values(), *range(self._next_unused, self.total)]

    def _record_change(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        if self._book is not None and (stored or removed):
            self._book.change(list(map(short, stored)), list(map(short, removed)))
