"""Count the KV blocks of the decoding batch without visiting each request at each step.

A request with c context tokens holds ceil(c / b) blocks, and c grows by one per step, so it allocates a block
at boundaries where c = 0 (mod b). As c - boundary (mod b) is constant, one count per residue gives the number
of blocks that the batch allocates at any later boundary.
"""

from __future__ import annotations


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Return the number of blocks that hold this many tokens."""
    return -(-tokens // block_tokens)


class DecodeBlocks:
    """Blocks held by the decoding requests of one instance at its current boundary."""

    __slots__ = ("_by_residue", "block_tokens", "requests", "used")

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.used = 0
        self.requests = 0
        self._by_residue = [0] * block_tokens

    def add(self, context: int, boundary: int) -> int:
        """Add a request with this context. Return its residue, to be passed to `remove`."""
        residue = (context - boundary) % self.block_tokens
        self._by_residue[residue] += 1
        self.requests += 1
        self.used += blocks_for(context, self.block_tokens)
        return residue

    def remove(self, context: int, residue: int) -> int:
        """Remove a request. Return the number of blocks it held."""
        held = blocks_for(context, self.block_tokens)
        self._by_residue[residue] -= 1
        self.requests -= 1
        self.used -= held
        return held

    def allocated(self, boundary: int, steps: int) -> int:
        """Return the number of blocks that the batch allocates in this many steps from a boundary."""
        size = self.block_tokens
        cycles, remainder = divmod(steps, size)
        blocks = cycles * self.requests
        if remainder:
            # Residues -boundary, -boundary - 1, ... (mod size), `remainder` of them.
            counts = self._by_residue
            end = -boundary % size + 1
            begin = end - remainder
            blocks += sum(counts[begin:end]) if begin >= 0 else sum(counts[:end]) + sum(counts[begin:])
        return blocks

    def advance(self, boundary: int, steps: int) -> None:
        """Account for this many steps from a boundary."""
        self.used += self.allocated(boundary, steps)

    def steps_until(self, boundary: int, free: int, limit: int) -> int:
        """Return the smallest number of steps after which the batch has allocated more than `free` blocks; at
        most `limit`."""
        size = self.block_tokens
        requests = self.requests
        if not requests or requests * -(-limit // size) <= free:
            return limit
        steps = free // requests * size
        remaining = free % requests
        counts = self._by_residue
        # A cycle allocates `requests` > `remaining` blocks, so this ends within one cycle.
        while remaining >= 0 and steps < limit:
            remaining -= counts[-(boundary + steps) % size]
            steps += 1
        return min(steps, limit)
