"""The blocks of KV memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tailrace.cache.book import CacheBook
from tailrace.cache.names import short


class BlockPool:
    """Blocks 0..total-1, each free or held by one request. A request's blocks are a list it owns.

    Free blocks that came back under a name keep their KV until their room is needed, those first that came
    back first. Unlike vLLM's, a block that a request holds has no name: two do not share it.
    """

    __slots__ = ("_book", "_named", "_returned", "_untouched", "block_tokens", "total")

    def __init__(self, total: int, block_tokens: int, book: CacheBook | None = None) -> None:
        """`book` is told of the names that come and go."""
        self.total = total
        self.block_tokens = block_tokens
        self._book = book
        self._named: OrderedDict[bytes, int] = OrderedDict()
        # Free are the blocks that came back, and those from this number on, which nobody has held yet:
        # a hundred engines with a large GPU's memory each then cost nothing until they are used.
        self._returned: list[int] = []
        self._untouched = 0

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._returned) + len(self._named) + self.total - self._untouched

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self._untouched - len(self._returned) - len(self._named)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_tokens)

    def grow(self, held: list[int], blocks: int) -> bool:
        """Let `held` have this many blocks; False, and nothing changes, when there are not enough."""
        missing = blocks - len(held)
        if missing > self.free:
            return False
        while missing > 0 and self._returned:
            held.append(self._returned.pop())
            missing -= 1
        if missing > 0:
            fresh = min(missing, self.total - self._untouched)
            held.extend(range(self._untouched, self._untouched + fresh))
            self._untouched += fresh
            evicted = [self._named.popitem(last=False) for _ in range(missing - fresh)]
            held.extend(block for _, block in evicted)
            self._tell((), [name for name, _ in evicted])
        return True

    def take(self, held: list[int], names: Sequence[bytes]) -> int:
        """Give `held`, which is empty, the blocks with these names, up to the first that is not there; how
        many there were."""
        for name in names:
            block = self._named.pop(name, None)
            if block is None:
                break
            held.append(block)
        self._tell((), names[: len(held)])
        return len(held)

    def release(self, held: list[int], names: Sequence[bytes] = ()) -> None:
        """Take back all blocks of `held`, the first of them under these names."""
        for block, name in reversed(list(zip(held, names, strict=False))):
            # Of two blocks with one name the older goes.
            older = self._named.pop(name, None)
            if older is not None:
                self._returned.append(older)
            self._named[name] = block
        self._tell(names[: len(held)], ())
        self._returned += held[len(names) :]
        held.clear()

    def free_blocks(self) -> list[int]:
        """The numbers of the blocks that nobody holds."""
        return [*self._returned, *self._named.values(), *range(self._untouched, self.total)]

    def _tell(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        if self._book is not None and (stored or removed):
            self._book.change(list(map(short, stored)), list(map(short, removed)))
