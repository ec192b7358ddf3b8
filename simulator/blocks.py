"""KV blocks of the decoding batch, without looking at each request at each step.

A request with c tokens of context holds ceil(c / b) blocks, and c grows by one a step, so it takes a new
block at boundaries where c = 0 (mod b). With c - boundary (mod b) constant, one count per residue tells how
many blocks the batch takes at any coming boundary.
"""

from __future__ import annotations


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that hold this many tokens."""
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
        """A request with this context joins; its residue, to give back to `remove`."""
        residue = (context - boundary) % self.block_tokens
        self._by_residue[residue] += 1
        self.requests += 1
        self.used += blocks_for(context, self.block_tokens)
        return residue

    def remove(self, context: int, residue: int) -> int:
        """It leaves; the blocks that it held."""
        held = blocks_for(context, self.block_tokens)
        self._by_residue[residue] -= 1
        self.requests -= 1
        self.used -= held
        return held

    def taken(self, boundary: int, steps: int) -> int:
        """Blocks that the batch takes in this many steps from a boundary."""
        size = self.block_tokens
        cycles, rest = divmod(steps, size)
        taken = cycles * self.requests
        if rest:
            # Residues -boundary, -boundary - 1, ... (mod size), `rest` of them.
            counts = self._by_residue
            end = -boundary % size + 1
            begin = end - rest
            taken += sum(counts[begin:end]) if begin >= 0 else sum(counts[:end]) + sum(counts[begin:])
        return taken

    def advance(self, boundary: int, steps: int) -> None:
        """The batch has made this many steps from a boundary."""
        self.used += self.taken(boundary, steps)

    def steps_until(self, boundary: int, free: int, most: int) -> int:
        """First number of steps, at most `most`, after which the batch has taken more than `free` blocks."""
        size = self.block_tokens
        requests = self.requests
        if not requests or requests * -(-most // size) <= free:
            return most
        steps = free // requests * size
        left = free % requests
        counts = self._by_residue
        # A cycle takes `requests` > left blocks, so this ends within one.
        while left >= 0 and steps < most:
            left -= counts[-(boundary + steps) % size]
            steps += 1
        return min(steps, most)
