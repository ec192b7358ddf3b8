"""The deployment's service-level objectives, which every policy plans for and every report evaluates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

from tailrace.durations import with_unit
from tailrace.policy.parameters import Parameter, ParameterError, Value, parse_parameters

# Those of Azure Conversation (Arrow, table 1): the loosest of the traces that most of the papers use.
DEFAULT_TTFT_S: Final = 2.0
DEFAULT_TPOT_S: Final = 0.15
# The users' reading pace (PASCAL, section V-A), in seconds per token.
READING_S: Final = 0.1


class MeasuredAnswer(Protocol):
    """The measurements by which an SLO is evaluated; None: no answer so far."""

    @property
    def ttft_s(self) -> float | None: ...
    @property
    def tpot_s(self) -> float | None: ...
    @property
    def qoe(self) -> float | None: ...
    @property
    def reasoning_tokens(self) -> int: ...


# Of what an objective may be, by the names of `tailrace set slo`; what is beyond them is a mistake, and would
# overflow or vanish in what is computed from it.
RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "ttft": (1e-6, 1e6),
    "tpot": (1e-6, 1e6),
    "qoe": (1e-6, 1.0),
    "pace": (1e-6, 1e6),
    "admit": (1e-3, 1e6),
}


# Fields of Slo, and of its message, by the names of OBJECTIVES.
FIELDS: Final = {"ttft": "ttft_s", "tpot": "tpot_s", "qoe": "qoe", "pace": "pace_s", "admit": "admit"}


_TIMES: Final = ("ttft", "tpot", "pace")


class SloError(ParameterError):
    """An objective is out of its range; the message names it, its value and the range."""


@dataclass(frozen=True, slots=True)
class Slo:
    """The objectives that a request must meet; None: no such objective.

    The first answering token of a reasoning request is due `ttft_s` after its submission, plus `tpot_s` for
    each reasoning token: the time by which a plain answer of that length would have got so far. Without
    `tpot_s` it is due at `ttft_s`.
    """

    ttft_s: float | None = DEFAULT_TTFT_S
    tpot_s: float | None = DEFAULT_TPOT_S
    # Smallest QoE of the answer; PASCAL requires 0.95 and nothing else (section V-A).
    qoe: float | None = None
    # The users' reading pace in seconds per token, used for QoE and pacer slack; None: READING_S, or `tpot_s`
    # if smaller.
    pace_s: float | None = None
    # A request is refused on arrival if its predicted TTFT exceeds `ttft_s` times this; None: none is.
    admit: float | None = None

    def __post_init__(self) -> None:
        """Raise SloError for an objective that is not a number within its range."""
        for name, (least, most) in RANGES.items():
            value = getattr(self, FIELDS[name])
            # NaN is within no range.
            if value is not None and not least <= value <= most:
                raise SloError(
                    f"{name}: {value!r} is not allowed; it is a number from {least:g} to {most:g}, or 0 for "
                    "none"
                )

    @property
    def reading_s(self) -> float:
        """Return the expected pace of an answer, in seconds per token."""
        if self.pace_s is not None:
            return self.pace_s
        return READING_S if self.tpot_s is None else min(READING_S, self.tpot_s)

    def met_by(self, answer: MeasuredAnswer) -> bool:
        """Return whether the request met all objectives. A refused one did not."""
        if answer.ttft_s is None or answer.tpot_s is None or answer.qoe is None:
            return False
        if self.ttft_s is not None and answer.ttft_s > self.ttft_s + self._reasoning_s(answer):
            return False
        if self.tpot_s is not None and answer.tpot_s > self.tpot_s:
            return False
        return self.qoe is None or answer.qoe >= self.qoe

    def describe(self) -> str:
        """Describe the objectives for a reader."""
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

    def _reasoning_s(self, answer: MeasuredAnswer) -> float:
        return 0.0 if self.tpot_s is None else self.tpot_s * answer.reasoning_tokens


# The objectives by the names of `tailrace set slo`.
OBJECTIVES: Final = (
    Parameter(
        DEFAULT_TTFT_S,
        "time to the first answering token; 0: no objective",
        unit="s",
        source="Arrow, table 1",
        minimum=0.0,
        maximum=RANGES["ttft"][1],
        name="ttft",
    ),
    Parameter(
        DEFAULT_TPOT_S,
        "mean time between answering tokens; 0: no objective",
        unit="s a token",
        source="Arrow, table 1",
        minimum=0.0,
        maximum=RANGES["tpot"][1],
        name="tpot",
    ),
    Parameter(
        0.0,
        "minimum QoE of an answer; 0: no objective",
        source="ours; PASCAL uses 0.95 (section V-A)",
        minimum=0.0,
        maximum=RANGES["qoe"][1],
        name="qoe",
    ),
    Parameter(
        0.0,
        "pace at which users read, on which QoE is based; 0: 0.1, or tpot if that is less",
        unit="s a token",
        source="PASCAL, section V-A (0.1)",
        minimum=0.0,
        maximum=RANGES["pace"][1],
        name="pace",
    ),
    Parameter(
        0.0,
        "refuse a request whose predicted TTFT exceeds this multiple of ttft; 0: never refuse",
        minimum=0.0,
        maximum=RANGES["admit"][1],
        name="admit",
    ),
)


def changed_slo(slo: Slo, changes: Mapping[str, Value]) -> Slo:
    """Return the SLO with some objectives changed, by the names of OBJECTIVES; 0 removes one.

    Raise ParameterError for unknown names and invalid values.
    """
    values = parse_parameters("slo", OBJECTIVES, changes)
    return replace(slo, **{FIELDS[name]: float(values[name]) or None for name in changes})


def read_objectives(texts: Mapping[str, str]) -> dict[str, float]:
    """Return given objectives, by the names of OBJECTIVES; times may have a unit: 2s, 150ms.

    Raise ParameterError for unknown names and invalid values.
    """
    changed = objectives(changed_slo(Slo(), texts))
    return {name: changed[name] or 0.0 for name in texts}


def objectives(slo: Slo) -> dict[str, float | None]:
    """Return the objectives by the names of OBJECTIVES; None: not set."""
    return {name: getattr(slo, field) for name, field in FIELDS.items()}


def assignments(slo: Slo) -> str:
    """Return the objectives as `tailrace set slo` takes them, times with their unit."""
    pairs = [
        f"{name}={with_unit(value) if name in _TIMES else f'{value:g}'}"
        for name, value in objectives(slo).items()
        if value is not None
    ]
    return " ".join(pairs) or "nothing asked for"
