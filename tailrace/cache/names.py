"""Names of KV blocks: vLLM's own block hashes, shortened to 64 bits.

vLLM names a full block by a hash over the name of the block before it, its tokens, and whatever else its KV
depends on: the LoRA adapter, the images in it, the cache salt (vllm/v1/core/kv_cache_utils.py). Whoever has
the tokens can work the names out and need not send the tokens. The last 64 bits are what vLLM itself tells
in KV events with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES: that two of a million blocks share them by chance has a
probability of 3e-8, and costs a wrong guess of where a prefix is.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

# The only way of naming that is worked out outside vLLM: its default. Others only their workers know.
ALGORITHM: Final = "sha256"
# Most blocks of a request that are named: the prefix beyond counts as not held.
MOST_BLOCKS: Final = 512


class Naming(msgspec.Struct, frozen=True, kw_only=True):
    """How an instance names its blocks. Instances with equal ones give equal names to equal blocks."""

    # vLLM's `prefix_caching_hash_algo`.
    algorithm: str
    # What the name before a request's first block is made from (vLLM: PYTHONHASHSEED).
    seed: str
    # Tokens of a block that has a name of its own.
    block_tokens: int


class Image(NamedTuple):
    """An input of another kind than text, by the tokens that stand for it."""

    identifier: str
    offset: int
    length: int


class Keys(NamedTuple):
    """What KV depends on besides the tokens."""

    # Name and path of a LoRA adapter.
    adapter: tuple[str, str] | None = None
    # By offset.
    images: Sequence[Image] = ()
    salt: str | None = None


NO_KEYS: Final = Keys()


def short(block_hash: bytes) -> int:
    """The name of the block with this hash."""
    return int.from_bytes(block_hash[-8:], "big")


def block_names(
    tokens: Sequence[int], naming: Naming, keys: Keys = NO_KEYS, most: int = MOST_BLOCKS
) -> list[int]:
    """Names of the full blocks that these tokens begin with, at most so many; none if the naming is foreign.

    The block of the last token is not among them: that one is computed even if all KV is there.
    """
    size = naming.block_tokens
    if naming.algorithm != ALGORITHM or size < 1:
        return []
    hasher = BlockHasher(naming, keys)
    before = hasher.first
    names: list[int] = []
    for number in range(min((len(tokens) - 1) // size, most)):
        begin = number * size
        before = hasher.following(before, tokens[begin : begin + size], begin)
        names.append(short(before))
    return names


class BlockHasher:
    """The hashes that names are made of, of one request's blocks."""

    __slots__ = ("_extra", "first")

    def __init__(self, naming: Naming, keys: Keys = NO_KEYS) -> None:
        # What stands for the block before the first one.
        self.first = _hash(naming.seed)
        self._extra = _keys_of_blocks(keys, naming.block_tokens)

    def following(self, before: bytes, tokens: Sequence[int], begin: int) -> bytes:
        """Of the full block with these tokens, the first of which has this number, after that block."""
        return _hash((before, tuple(tokens), self._extra(begin) if self._extra else None))


def _hash(value: object) -> bytes:
    # Pickled to be hashed, as vLLM does; nothing is ever unpickled.
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def _keys_of_blocks(keys: Keys, size: int) -> Callable[[int], tuple[object, ...] | None] | None:
    """What else goes into the name of the block that begins at a token; None: nothing, for any block."""
    if keys == NO_KEYS:
        return None

    def extra(begin: int) -> tuple[object, ...] | None:
        found: list[object] = []
        if keys.adapter is not None:
            found.append(("lora", *keys.adapter))
        found.extend(
            ("mm", image.identifier, image.offset - begin)
            for image in keys.images
            if image.offset < begin + size and begin < image.offset + image.length
        )
        if begin == 0 and keys.salt:
            found.append(("cache_salt", keys.salt))
        return tuple(found) or None

    return extra
