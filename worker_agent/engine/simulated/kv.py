"""Simulated KV bytes that depend on the tokens they represent.

The bytes of a block are a pattern of the model, XORed throughout with a 64-bit digest (the seed) of the
block's tokens and all before them. So they can be generated as fast as memory is written, and a receiver can
recover the digest: damaged bytes are no such XOR, and blocks of other positions or prompts have another
digest.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b, shake_128
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from tailrace.cache.book import CacheBook
from tailrace.cache.names import BlockHasher, Keys, Naming, short
from worker_agent.engine.base import KvShape
from worker_agent.engine.errors import KvCorrupt

# Bytes processed at a time, so that they are still in the CPU's cache when their checksum is computed.
_CHUNK_BYTES: Final = 256 << 10

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]


@dataclass(slots=True, eq=False)
class HostStaging:
    """Staging in ordinary memory."""

    array: Bytes

    @property
    def buffer(self) -> object:
        """Return the numpy array."""
        return self.array


def staged_bytes(staging_buffer: object, size: int) -> Bytes:
    """Return the first `size` bytes of a staging buffer. Raise ValueError if it is shorter."""
    view = np.frombuffer(staging_buffer, np.uint8)  # type: ignore[call-overload]
    if view.size < size:
        raise ValueError(f"staging holds {view.size} bytes, {size} are needed")
    return view[:size]  # type: ignore[no-any-return]


@lru_cache(maxsize=8)
def _pattern(fingerprint: str, block_bytes: int) -> Words:
    noise = shake_128(fingerprint.encode()).digest(block_bytes)
    return np.frombuffer(noise, np.uint64)


class KvCodec:
    """Generates and verifies the bytes of blocks of one shape, a chunk at a time."""

    __slots__ = ("_chunk_blocks", "_pattern", "_scratch", "block_bytes")

    def __init__(self, shape: KvShape) -> None:
        if shape.block_bytes % 8:
            raise RuntimeError(f"a KV block must be a multiple of 8 bytes, not {shape.block_bytes}")
        self.block_bytes = shape.block_bytes
        self._pattern = _pattern(shape.model_fingerprint, shape.block_bytes)
        self._chunk_blocks = max(1, _CHUNK_BYTES // shape.block_bytes)
        self._scratch: Bytes | None = None

    def write(self, seeds: Words, out: Bytes) -> list[int]:
        """Write the bytes of the blocks with these seeds; return one 64-bit checksum (XXH3) per block."""
        checksums: list[int] = []
        size = self.block_bytes
        for start in range(0, len(seeds), self._chunk_blocks):
            part = seeds[start : start + self._chunk_blocks]
            data = out[start * size : (start + len(part)) * size]
            self._expand(part, data)
            checksums += self._checksums(data)
        return checksums

    def read(self, data: Bytes, checksums: Sequence[int], first_block: int) -> Words:
        """Return the seeds of received blocks, numbered from `first_block`.

        Raise KvCorrupt for bytes that do not match their checksum or do not belong to this model.
        """
        size = self.block_bytes
        if self._scratch is None:
            self._scratch = np.empty(self._chunk_blocks * size, np.uint8)
        seeds: Words = data.view(np.uint64)[:: size // 8] ^ self._pattern[0]
        for start in range(0, len(seeds), self._chunk_blocks):
            part = seeds[start : start + self._chunk_blocks]
            end = start + len(part)
            expected = self._scratch[: len(part) * size]
            self._expand(part, expected)
            computed = self._checksums(data[start * size : end * size])
            for block, actual, sent, model in zip(
                range(first_block + start, first_block + end),
                computed,
                checksums[start:end],
                self._checksums(expected),
                strict=True,
            ):
                if actual != sent:
                    raise KvCorrupt(f"block {block} arrived damaged")
                if actual != model:
                    raise KvCorrupt(f"block {block} is not a block of this model")
        return seeds

    def _expand(self, seeds: Words, out: Bytes) -> None:
        words = out.view(np.uint64).reshape(len(seeds), -1)
        np.bitwise_xor(self._pattern[None, :], seeds[:, None], out=words)

    def _checksums(self, data: Bytes) -> list[int]:
        size = self.block_bytes
        view = memoryview(data)  # type: ignore[arg-type]
        return [xxhash.xxh3_64_intdigest(view[at : at + size]) for at in range(0, len(view), size)]


class BlockChain:
    """The hashes of a request's blocks, each of its tokens and all before them; computed on demand.

    Those of full blocks equal vLLM's, so that a front end knows their names.
    """

    __slots__ = ("_block_tokens", "_full", "_hasher", "_outputs", "_prompt")

    def __init__(self, naming: Naming, keys: Keys, prompt: list[int], outputs: list[int]) -> None:
        """The seed of `naming` identifies the model."""
        self._block_tokens = naming.block_tokens
        self._hasher = BlockHasher(naming, keys)
        self._prompt = prompt
        # The request's own list, to which tokens are only appended.
        self._outputs = outputs
        # Entry i + 1 is the hash of block i; entry 0 is the start of the chain.
        self._full = [self._hasher.first]

    def full(self, first: int, last: int) -> list[bytes]:
        """Return the hashes of blocks [first, last), all of which are full."""
        size = self._block_tokens
        full = self._full
        while len(full) <= last:
            at = (len(full) - 1) * size
            full.append(self._hasher.next_hash(full[-1], self._tokens(at, at + size), at))
        return full[first + 1 : last + 1]

    def seeds(self, first: int, last: int, tokens: int) -> Words:
        """Return the seeds of blocks [first, last) if `tokens` tokens have KV; the last one may be
        partial."""
        whole = tokens // self._block_tokens
        digests = self.full(first, min(last, whole))
        if last > whole:
            before = self._full[0] if whole == 0 else self.full(whole - 1, whole)[0]
            partial = array("I", self._tokens(whole * self._block_tokens, tokens)).tobytes()
            digests.append(blake2b(before + partial, digest_size=16).digest())
        return seeds_of(digests)

    def _tokens(self, start: int, end: int) -> Sequence[int]:
        split = len(self._prompt)
        if end <= split:
            return self._prompt[start:end]
        if start >= split:
            return self._outputs[start - split : end - split]
        return self._prompt[start:] + self._outputs[: end - split]


def seeds_of(digests: Sequence[bytes]) -> Words:
    """Return the seeds of the blocks with these hashes."""
    return np.frombuffer(b"".join(digest[:8] for digest in digests), np.uint64)


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
