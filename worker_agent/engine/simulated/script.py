"""The output of a simulated model: token i is a pure function of (prompt, seed, i)."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b, shake_128
from pathlib import Path
from typing import Final

import msgspec

from tailrace.wire.requests import SamplingParams
from worker_agent.engine.simulated.settings import SimulatedSettings

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


_CHUNK: Final = 128
_NEVER: Final = 1 << 60
# Limit of a drawn length, in multiples of its mean.
_MAX_DRAW: Final = 6.0


class _Lengths(msgspec.Struct):
    """Lengths that a request may set in its sampling parameters' extra_args (`vllm_xargs` over HTTP)."""

    reasoning_tokens: int | None = None
    answer_tokens: int | None = None


_lengths = msgspec.msgpack.Decoder(_Lengths | None)


class Script:
    """The output of one request: reasoning between its tags, an answer, and the end-of-sequence token. If
    that is ignored, letters follow without end.
    """

    __slots__ = (
        "_chunk",
        "_chunk_start",
        "_key",
        "_min_tokens",
        "_think_at",
        "_vocabulary",
        "end_think_at",
        "eos",
        "eos_at",
        "stops",
    )

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        settings: SimulatedSettings,
        vocabulary: Vocabulary,
    ) -> None:
        digest = blake2b(array("I", prompt).tobytes(), digest_size=32, key=b"tailrace simulated")
        digest.update(f"{settings.weights_seed} {sampling.seed or 0}".encode())
        self._key = digest.digest()
        self._vocabulary = vocabulary
        self._min_tokens = sampling.min_tokens
        self._chunk: list[int] = []
        self._chunk_start = _NEVER
        self.eos = -1 if sampling.eos_token_id is None or sampling.ignore_eos else sampling.eos_token_id
        self.stops: frozenset[int] = frozenset(sampling.stop_token_ids or ())
        if self._min_tokens and self.stops.issuperset(vocabulary.letters):
            raise ValueError("every letter is a stop token, and min_tokens forbids them all")

        lengths = self._asked_lengths(sampling)
        reasoning, answer = lengths.reasoning_tokens, lengths.answer_tokens
        if reasoning is None:
            reasoning = _draw(self._key[0:8], settings.reasoning_mean_tokens)
        if answer is None:
            answer = _draw(self._key[8:16], settings.answer_mean_tokens)

        # Index of the opening and of the closing tag; -1: there is none.
        self._think_at = self.end_think_at = -1
        reasoning_open = opens_reasoning(prompt, vocabulary)
        end = answer
        if (
            settings.reasoning_mean_tokens
            and vocabulary.end_think is not None
            and reasoning_open is not False
        ):
            if reasoning_open is None:
                self._think_at = 0
            self.end_think_at = self._think_at + 1 + reasoning
            end += self.end_think_at + 1
        self.eos_at = _NEVER if self.eos < 0 else max(end, self._min_tokens)

    @staticmethod
    def _asked_lengths(sampling: SamplingParams) -> _Lengths:
        try:
            return _lengths.decode(sampling.extra_args) or _Lengths()
        except msgspec.ValidationError as error:
            raise ValueError(f"extra_args: {error}") from error

    @property
    def identity(self) -> bytes:
        """Return a digest of everything that the tokens depend on, except for the settings."""
        return self._key

    def token(self, index: int) -> int:
        """Return token `index` of the output."""
        if index == self.end_think_at or index == self._think_at:
            tags = self._vocabulary
            tag = tags.end_think if index == self.end_think_at else tags.think
            # If the vocabulary has no opening tag, the reasoning begins without one.
            return self._letter(index) if tag is None else tag
        if index == self.eos_at:
            return self.eos
        if index < self._min_tokens and self.stops:
            return self._allowed(index)
        at = index - self._chunk_start
        if 0 <= at < _CHUNK:
            return self._chunk[at]
        return self._letter(index)

    def _letter(self, index: int) -> int:
        start = index - index % _CHUNK
        if start != self._chunk_start:
            letters = self._vocabulary.letters
            noise = shake_128(self._key + start.to_bytes(8, "little")).digest(_CHUNK)
            self._chunk = [letters[byte] for byte in noise]
            self._chunk_start = start
        return self._chunk[index - start]

    def _allowed(self, index: int) -> int:
        # A sampler draws no stop token before min_tokens: take the next letter that is not one.
        letters = self._vocabulary.letters
        first = letters.index(self._letter(index))
        return next(token for token in (*letters[first:], *letters[:first]) if token not in self.stops)


def opens_reasoning(tokens: Sequence[int], vocabulary: Vocabulary) -> bool | None:
    """Return whether these tokens leave reasoning open (True) or ended (False), or have no tag (None).

    The last tag decides, as in vLLM's reasoning parsers.
    """
    think, end_think = vocabulary.think, vocabulary.end_think
    if think not in tokens and end_think not in tokens:
        return None
    for token in reversed(tokens):
        if token == end_think:
            return False
        if token == think:
            return True
    return None


def _draw(noise: bytes, mean: int) -> int:
    """Return an exponentially distributed length with about this mean."""
    if mean <= 0:
        return 0
    uniform = (int.from_bytes(noise, "little") + 1) / (1 << 64)
    return max(1, round(mean * min(_MAX_DRAW, -math.log(uniform))))
