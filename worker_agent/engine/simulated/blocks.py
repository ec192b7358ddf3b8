"""The blocks of KV memory."""

from __future__ import annotations


class BlockPool:
    """Blocks 0..total-1, each free or held by one request. A request's blocks are a list it owns."""

    __slots__ = ("_returned", "_untouched", "block_tokens", "total")

    def __init__(self, total: int, block_tokens: int) -> None:
        self.total = total
        self.block_tokens = block_tokens
        # Free are the blocks that came back, and those from this number on, which nobody has held yet:
        # a hundred engines with a large GPU's memory each then cost nothing until they are used.
        self._returned: list[int] = []
        self._untouched = 0

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._returned) + self.total - self._untouched

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self._untouched - len(self._returned)

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
            held.extend(range(self._untouched, self._untouched + missing))
            self._untouched += missing
        return True

    def release(self, held: list[int]) -> None:
        """Take back all blocks of `held`."""
        self._returned += held
        held.clear()

    def free_blocks(self) -> list[int]:
        """The numbers of the blocks that nobody holds."""
        return [*self._returned, *range(self._untouched, self.total)]
