"""The blocks of KV memory."""

from __future__ import annotations


class BlockPool:
    """Blocks 0..total-1, each free or held by one request. A request's blocks are a list it owns."""

    __slots__ = ("_free", "block_tokens", "total")

    def __init__(self, total: int, block_tokens: int) -> None:
        self.total = total
        self.block_tokens = block_tokens
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.total - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_tokens)

    def grow(self, held: list[int], blocks: int) -> bool:
        """Let `held` have this many blocks; False, and nothing changes, when there are not enough."""
        missing = blocks - len(held)
        if missing > len(self._free):
            return False
        if missing > 0:
            held += self._free[: -missing - 1 : -1]
            del self._free[-missing:]
        return True

    def release(self, held: list[int]) -> None:
        """Take back all blocks of `held`."""
        self._free.extend(reversed(held))
        held.clear()
