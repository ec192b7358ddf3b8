"""The phase of a request (prefill, reasoning or answering), from its token IDs and the model's parser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vllm.config import VllmConfig
from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.tokenizers import cached_tokenizer_from_config

from tailrace.cluster import Phase
from tailrace.output_flags import OutputFlag

# Used for every token: module globals are cheaper than enum members, and plain ints than flags.
_REASONING: Final = Phase.REASONING
_ANSWERING: Final = Phase.ANSWERING
_NOTHING: Final = int(OutputFlag.NONE)
_ANSWER_BEGUN: Final = int(OutputFlag.ANSWER_BEGUN)
_PREFILL_DONE: Final = int(OutputFlag.PREFILL_DONE)
_REASONING_ENDED: Final = int(OutputFlag.REASONING_ENDED)


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The tokens that end the model's reasoning, and the parser that recognises them in prompts."""

    parser: ReasoningParser
    end_token_ids: frozenset[int]

    def opens_reasoning(self, prompt_token_ids: Sequence[int]) -> bool:
        """Return whether the output for this prompt begins with reasoning."""
        return not self.parser.is_reasoning_end(list(prompt_token_ids))


def load_marks(config: VllmConfig) -> ReasoningMarks | None:
    """Load the marks of the configured reasoning parser; return None if the model does not reason or has no
    tokenizer.

    Raises RuntimeError if the parser is unknown or has no single token that ends reasoning.
    """
    name = config.structured_outputs_config.reasoning_parser
    if not name or config.model_config.skip_tokenizer_init:
        return None
    try:
        parser = ReasoningParserManager.get_reasoning_parser(name)(
            cached_tokenizer_from_config(config.model_config)
        )
    except (KeyError, ValueError, RuntimeError) as error:
        raise RuntimeError(f"--reasoning-parser {name}: it does not fit this model: {error}") from error
    ends = _end_token_ids(parser)
    if not ends:
        raise RuntimeError(
            f"--reasoning-parser {name}: it has no single end-of-reasoning token; use another parser"
        )
    return ReasoningMarks(parser, ends)


def _end_token_ids(parser: ReasoningParser) -> frozenset[int]:
    several = getattr(parser, "reasoning_end_token_ids", None)
    if several:
        return frozenset(several)
    one = getattr(parser, "end_token_id", None)
    if one is None:
        one = parser.vocab.get(parser.reasoning_end_str or "")
    return frozenset() if one is None else frozenset([one])


class PhaseTracker:
    """One request's phase, advanced by its output tokens."""

    __slots__ = ("_answer_due", "_end_token_ids", "_reasons", "phase", "reasoning_tokens")

    def __init__(self, marks: ReasoningMarks | None, prompt_token_ids: Sequence[int]) -> None:
        self.phase = Phase.PREFILL
        self.reasoning_tokens = 0
        self._end_token_ids: frozenset[int] = frozenset() if marks is None else marks.end_token_ids
        self._reasons = marks is not None and marks.opens_reasoning(prompt_token_ids)
        # The reasoning has ended, and no token has followed yet.
        self._answer_due = False

    @property
    def reasons(self) -> bool:
        """Whether the next output token belongs to the reasoning."""
        return self._reasons

    def replay(self, token_ids: Sequence[int]) -> None:
        """Advance over tokens that were emitted elsewhere, without reporting their flags."""
        if token_ids:
            self.advance(token_ids)

    def back_to_prefill(self) -> None:
        """Return to PREFILL because the KV must be recomputed; the next token restores the phase."""
        self.phase = Phase.PREFILL

    def advance(self, token_ids: Sequence[int]) -> int:
        """Advance over the next tokens (at least one) and return the resulting `OutputFlag`s."""
        phase = self.phase
        if phase is _ANSWERING:
            if not self._answer_due:
                return _NOTHING
            self._answer_due = False
            return _ANSWER_BEGUN
        if phase is _REASONING:
            return self._reason(token_ids)
        if not self._reasons:
            self.phase = _ANSWERING
            begun, self._answer_due = self._answer_due, False
            return _PREFILL_DONE | _REASONING_ENDED | (_ANSWER_BEGUN if begun else _NOTHING)
        self.phase = _REASONING
        return _PREFILL_DONE | self._reason(token_ids)

    def _reason(self, token_ids: Sequence[int]) -> int:
        ends = self._end_token_ids
        for count, token_id in enumerate(token_ids, 1):
            self.reasoning_tokens += 1
            if token_id in ends:
                self._reasons = False
                self._answer_due = count == len(token_ids)
                self.phase = _ANSWERING
                return _REASONING_ENDED if self._answer_due else _REASONING_ENDED | _ANSWER_BEGUN
        return _NOTHING
