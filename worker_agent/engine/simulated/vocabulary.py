"""The token IDs of simulated text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

# 64 letters with the spaces and frequencies of something like a language.
_ALPHABET = "etaoinshrdlu cmfwyp vbgkjqxz eta oin shr dlu the and ing ion er "


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int]


class _TokenizerFile(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token IDs: one letter for each of the 256 byte values, with repetitions, and the two reasoning tags."""

    letters: tuple[int, ...]
    think: int | None
    end_think: int | None


@lru_cache(maxsize=16)
def read_vocabulary(folder: str, think: str, end_think: str) -> Vocabulary:
    """Read a byte-level tokenizer's `tokenizer.json`. Raise RuntimeError, saying what is missing."""
    path = Path(folder) / "tokenizer.json"
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
    except (OSError, msgspec.DecodeError) as error:
        raise RuntimeError(f"cannot read the tokenizer {path}: {error}") from error
    ids: Mapping[str, int] = file.model.vocab
    added = {token.content: token.id for token in file.added_tokens}
    try:
        # Byte-level tokenizers show a space as U+0120.
        letters = [ids[letter.replace(" ", "\u0120")] for letter in _ALPHABET]
    except KeyError as error:
        raise RuntimeError(f"{path} is not a byte-level tokenizer: it has no token {error}") from error
    return Vocabulary(
        letters=tuple(letters[byte % len(letters)] for byte in range(256)),
        think=added.get(think, ids.get(think)),
        end_think=added.get(end_think, ids.get(end_think)),
    )
