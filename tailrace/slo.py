"""The deployment's service-level objectives: what every policy plans for and every report judges by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

from tailrace.policy.parameters import Parameter, Value, parse_parameters

# Azure Conversation's (Arrow, table 1): the loosest of the traces that most of the papers use.
DEFAULT_TTFT_S: Final = 2.0
DEFAULT_TPOT_S: Final = 0.15
# How fast users read (PASCAL, section V-A), in seconds a token.
READING_S: Final = 0.1


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
    # Seconds a token at which users read, which QoE and pacer slack go by; None: READING_S, or `tpot_s` where
    # that asks for more.
    pace_s: float | None = None
    # A request is refused on arrival if its predicted TTFT is so many times `ttft_s`; None: nobody is.
    admit: float | None = None

    @property
    def reading_s(self) -> float:
        """Seconds a token at which an answer is expected."""
        if self.pace_s is not None:
            return self.pace_s
        return READING_S if self.tpot_s is None else min(READING_S, self.tpot_s)

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
        if self.admit is not None and self.ttft_s is not None:
            parts.append(f"refused if TTFT is predicted beyond {self.admit * self.ttft_s:g} s")
        return ", ".join(parts) or "finished"

    def _reasoning_s(self, answer: Answer) -> float:
        return 0.0 if self.tpot_s is None else self.tpot_s * answer.reasoning_tokens


# What users set; the names are those of `tailrace set slo`.
OBJECTIVES: Final = (
    Parameter(
        "ttft",
        float,
        DEFAULT_TTFT_S,
        "time to the first answering token; 0: no objective",
        unit="s",
        source="Arrow, table 1",
        minimum=0.0,
    ),
    Parameter(
        "tpot",
        float,
        DEFAULT_TPOT_S,
        "mean time between answering tokens; 0: no objective",
        unit="s a token",
        source="Arrow, table 1",
        minimum=0.0,
    ),
    Parameter(
        "qoe",
        float,
        0.0,
        "minimum QoE of an answer; 0: no objective",
        source="ours; PASCAL uses 0.95 (section V-A)",
        minimum=0.0,
        maximum=1.0,
    ),
    Parameter(
        "pace",
        float,
        0.0,
        "pace at which users read, on which QoE is based; 0: 0.1, or tpot if that is less",
        unit="s a token",
        source="PASCAL, section V-A (0.1)",
        minimum=0.0,
    ),
    Parameter(
        "admit",
        float,
        0.0,
        "refuse a request whose predicted TTFT exceeds this multiple of ttft; 0: never refuse",
        source="ours",
        minimum=0.0,
    ),
)


def changed_slo(slo: Slo, given: Mapping[str, Value]) -> Slo:
    """The SLO with other objectives, by the names of OBJECTIVES; 0 takes one away.

    Raises ParameterError for unknown names and values that are not allowed.
    """
    values = parse_parameters("slo", OBJECTIVES, given)
    return replace(slo, **{FIELDS[name]: float(values[name]) or None for name in given})


def objectives(slo: Slo) -> dict[str, float | None]:
    """By the names of OBJECTIVES; None: not asked for."""
    return {name: getattr(slo, field) for name, field in FIELDS.items()}


def assignments(slo: Slo) -> str:
    """As `tailrace set slo` takes it."""
    asked = [f"{name}={value:g}" for name, value in objectives(slo).items() if value is not None]
    return " ".join(asked) or "nothing asked for"


# By the names of OBJECTIVES: fields of Slo, and of its message.
FIELDS: Final = {"ttft": "ttft_s", "tpot": "tpot_s", "qoe": "qoe", "pace": "pace_s", "admit": "admit"}
