"""Names of KV blocks: vLLM's own block hashes, truncated to 64 bits.

vLLM hashes a full block from the hash of the block before it, its tokens, and everything else that its KV
depends on: the LoRA adapter, the images in it, the cache salt (vllm/v1/core/kv_cache_utils.py). A service
that has the tokens can compute the names and need not send the tokens. vLLM itself publishes the last 64 bits
in KV events with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES. Two of a million blocks collide with a probability of
3e-8, which costs one wrong guess about where a prefix is.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

# The only hash algorithm implemented here: vLLM's default. With others, only vLLM can compute names.
ALGORITHM: Final = "sha256"
# Maximum named blocks per request; the prefix beyond counts as not cached.
BLOCKS_MAX: Final = 512


class Naming(msgspec.Struct, frozen=True, kw_only=True):
    """How an instance names its blocks. With equal namings, equal blocks have equal names."""

    # vLLM's `prefix_caching_hash_algo`.
    algorithm: str
    # Seed of the hash chain (vLLM: PYTHONHASHSEED).
    seed: str
    # Tokens per named block.
    block_tokens: int


class Image(NamedTuple):
    """A multimodal input, and its placeholder tokens."""

    identifier: str
    offset: int
    length: int


class Keys(NamedTuple):
    """Everything that KV depends on except the tokens."""

    # Name and path of a LoRA adapter.
    adapter: tuple[str, str] | None = None
    # By offset.
    images: Sequence[Image] = ()
    salt: str | None = None


NO_KEYS: Final = Keys()


def short(block_hash: bytes) -> int:
    """Return the name of the block with this hash."""
    return int.from_bytes(block_hash[-8:], "big")


def block_names(
    tokens: Sequence[int], naming: Naming, keys: Keys = NO_KEYS, limit: int = BLOCKS_MAX
) -> list[int]:
    """Return the names of the first `limit` full blocks of the tokens; none if the algorithm is unsupported.

    The block of the last token is excluded: it is always computed, even if all KV is cached.
    """
    size = naming.block_tokens
    if naming.algorithm != ALGORITHM or size < 1:
        return []
    hasher = BlockHasher(naming, keys)
    parent_hash = hasher.first
    names: list[int] = []
    for number in range(min((len(tokens) - 1) // size, limit)):
        begin = number * size
        parent_hash = hasher.next_hash(parent_hash, tokens[begin : begin + size], begin)
        names.append(short(parent_hash))
    return names


class BlockHasher:
    """Compute the block hashes of one request."""

    __slots__ = ("_extra", "first")

    def __init__(self, naming: Naming, keys: Keys = NO_KEYS) -> None:
        # The start of the hash chain.
        self.first = _hash(naming.seed)
        self._extra = _keys_of_blocks(keys, naming.block_tokens)

    def next_hash(self, parent_hash: bytes, tokens: Sequence[int], begin: int) -> bytes:
        """Return the hash of a full block from the hash of the block before it, its tokens, and the position
        of its first token."""
        return _hash((parent_hash, tuple(tokens), self._extra(begin) if self._extra else None))


def _hash(value: object) -> bytes:
    # Pickled to be hashed, as vLLM does; nothing is ever unpickled.
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def _keys_of_blocks(keys: Keys, size: int) -> Callable[[int], tuple[object, ...] | None] | None:
    """Return a function from a block's first position to its extra hash keys; None: no block has any."""
    if keys == NO_KEYS:
        return None

    def extra(begin: int) -> tuple[object, ...] | None:
        extra_keys: list[object] = []
        if keys.adapter is not None:
            extra_keys.append(("lora", *keys.adapter))
        extra_keys.extend(
            ("mm", image.identifier, image.offset - begin)
            for image in keys.images
            if image.offset < begin + size and begin < image.offset + image.length
        )
        if begin == 0 and keys.salt:
            extra_keys.append(("cache_salt", keys.salt))
        return tuple(extra_keys) or None

    return extra
