"""KV bytes that depend on what they stand for.

The bytes of a block are a pattern of the model's, XORed throughout with 64 bits that digest the block's
tokens and all before them. So they can be made as fast as memory is written, and from received bytes the
receiver gets the digest back: bytes that are damaged are no such XOR, and another block's or another prompt's
bytes give another digest.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b, shake_128
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from tailrace.cache.names import BlockHasher, Keys, Naming
from worker_agent.engine.base import KvShape
from worker_agent.engine.errors import KvCorrupt

# Worked on at a time, so that what is written is still in the cache when its checksum is made.
_CACHED_BYTES: Final = 256 << 10

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]


class HostStaging:
    """Staging in ordinary memory."""

    __slots__ = ("array",)

    def __init__(self, array: Bytes) -> None:
        self.array = array

    @property
    def buffer(self) -> object:
        """The numpy array."""
        return self.array


def staged_bytes(staging_buffer: object, size: int) -> Bytes:
    """The first `size` bytes of a staging buffer. Raises ValueError when it is shorter."""
    view = np.frombuffer(staging_buffer, np.uint8)  # type: ignore[call-overload]
    if view.size < size:
        raise ValueError(f"staging holds {view.size} bytes, {size} are needed")
    return view[:size]  # type: ignore[no-any-return]


@lru_cache(maxsize=8)
def _pattern(fingerprint: str, block_bytes: int) -> Words:
    noise = shake_128(fingerprint.encode()).digest(block_bytes)
    return np.frombuffer(noise, np.uint64)


class KvCodec:
    """Makes and checks the bytes of blocks of one shape, a cache's worth at a time."""

    __slots__ = ("_at_a_time", "_pattern", "_scratch", "block_bytes")

    def __init__(self, shape: KvShape) -> None:
        if shape.block_bytes % 8:
            raise RuntimeError(f"a KV block must be a multiple of 8 bytes, not {shape.block_bytes}")
        self.block_bytes = shape.block_bytes
        self._pattern = _pattern(shape.model_fingerprint, shape.block_bytes)
        self._at_a_time = max(1, _CACHED_BYTES // shape.block_bytes)
        self._scratch: Bytes | None = None

    def write(self, seeds: Words, out: Bytes) -> list[int]:
        """Write the bytes of the blocks with these seeds; one 64-bit checksum (XXH3) a block."""
        checksums: list[int] = []
        size = self.block_bytes
        for start in range(0, len(seeds), self._at_a_time):
            part = seeds[start : start + self._at_a_time]
            data = out[start * size : (start + len(part)) * size]
            self._expand(part, data)
            checksums += self._checksums(data)
        return checksums

    def read(self, data: Bytes, checksums: Sequence[int], first_block: int) -> Words:
        """The seeds of received blocks, the first of which has this number.

        Raises KvCorrupt for bytes that have not their checksum, or that no block of this model has.
        """
        size = self.block_bytes
        if self._scratch is None:
            self._scratch = np.empty(self._at_a_time * size, np.uint8)
        seeds: Words = data.view(np.uint64)[:: size // 8] ^ self._pattern[0]
        for start in range(0, len(seeds), self._at_a_time):
            part = seeds[start : start + self._at_a_time]
            end = start + len(part)
            expected = self._scratch[: len(part) * size]
            self._expand(part, expected)
            found = self._checksums(data[start * size : end * size])
            for block, ours, theirs, model in zip(
                range(first_block + start, first_block + end),
                found,
                checksums[start:end],
                self._checksums(expected),
                strict=True,
            ):
                if ours != theirs:
                    raise KvCorrupt(f"block {block} arrived damaged")
                if ours != model:
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
    """The hashes of a request's blocks, each of its tokens and all before it; made as they are asked for.

    Those of full blocks are vLLM's, so that a front end finds their names.
    """

    __slots__ = ("_block_tokens", "_full", "_hasher", "_outputs", "_prompt")

    def __init__(self, naming: Naming, keys: Keys, prompt: list[int], outputs: list[int]) -> None:
        """`naming`: its seed stands for the model."""
        self._block_tokens = naming.block_tokens
        self._hasher = BlockHasher(naming, keys)
        self._prompt = prompt
        # The request's own list: it grows, and never changes.
        self._outputs = outputs
        # Entry 0 stands for what is before the first block.
        self._full = [self._hasher.first]

    def full(self, first: int, last: int) -> list[bytes]:
        """Hashes of blocks [first, last), all of them full."""
        size = self._block_tokens
        full = self._full
        while len(full) <= last:
            at = (len(full) - 1) * size
            full.append(self._hasher.following(full[-1], self._tokens(at, at + size), at))
        return full[first + 1 : last + 1]

    def seeds(self, first: int, last: int, tokens: int) -> Words:
        """Seeds of blocks [first, last) when `tokens` tokens have KV; the last block may be partial."""
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
    """What the bytes of these blocks are made from."""
    return np.frombuffer(b"".join(digest[:8] for digest in digests), np.uint64)
