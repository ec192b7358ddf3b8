"""The deployment's service-level objectives: what every policy plans for and every report judges by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

# Azure Conversation's (Arrow, table 1): the loosest of the traces that most of the papers use.
DEFAULT_TTFT_S: Final = 2.0
DEFAULT_TPOT_S: Final = 0.15
# PASCAL, section V-A.
DEFAULT_QOE: Final = 0.95


class Answer(Protocol):
    """What an SLO is judged by; None: the answer never came so far."""

    @property
    def ttft_s(self) -> float | None: ...
    @property
    def tpot_s(self) -> float | None: ...
    @property
    def qoe(self) -> float | None: ...
    @property
    def reasoning_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count as good; None: not asked for.

    The first answering token of a request that reasons is due `ttft_s` after its submission, and later by
    `tpot_s` for each token that it reasons: the time by which a plain answer of that length would have got
    so far. Without `tpot_s` it is due at `ttft_s` all the same.
    """

    ttft_s: float | None = DEFAULT_TTFT_S
    tpot_s: float | None = DEFAULT_TPOT_S
    # Least QoE of the answer; PASCAL asks for 0.95 and nothing else (section V-A).
    qoe: float | None = None

    def met_by(self, answer: Answer) -> bool:
        """Whether the request kept all of it. One that was refused did not."""
        if answer.ttft_s is None or answer.tpot_s is None or answer.qoe is None:
            return False
        if self.ttft_s is not None and answer.ttft_s > self.ttft_s + self._reasoning_s(answer):
            return False
        if self.tpot_s is not None and answer.tpot_s > self.tpot_s:
            return False
        return self.qoe is None or answer.qoe >= self.qoe

    def words(self) -> str:
        """For a reader."""
        parts = []
        if self.ttft_s is not None:
            later = f" + {self.tpot_s:g} s a reasoning token" if self.tpot_s is not None else ""
            parts.append(f"TTFT within {self.ttft_s:g} s{later}")
        if self.tpot_s is not None:
            parts.append(f"TPOT within {self.tpot_s:g} s")
        if self.qoe is not None:
            parts.append(f"QoE of at least {self.qoe:g}")
        return ", ".join(parts) or "finished"

    def _reasoning_s(self, answer: Answer) -> float:
        return 0.0 if self.tpot_s is None else self.tpot_s * answer.reasoning_tokens
