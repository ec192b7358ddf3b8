"""A row of the table: what a client got from plain `vllm serve`, and from the fleet with moves and a kill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

from tests.clients.moving import Disturbed

# Characters of an answer or of an error in the table.
_SHOWN: Final = 120


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of a client returned."""

    requests: int
    # By name of the request, if the client tells them apart.
    errors: Mapping[str, str] = field(default_factory=dict)
    # What is compared, by name: texts, reasons to finish, numbers of tokens, scores.
    answers: Mapping[str, object] = field(default_factory=dict)

    def result(self, name: str) -> object:
        """Return an answer, or an error as such. None: the run has neither."""
        return {"error": self.errors[name]} if name in self.errors else self.answers.get(name)


@dataclass(slots=True)
class Row:
    """One client."""

    client: str
    version: str
    # What may differ, since the fleet refuses it.
    known: list[str] = field(default_factory=list)
    # Why it was not run to its end.
    failed: str = ""
    plain: Outcome | None = None
    moved: Outcome | None = None
    # Of the run against the fleet.
    moves: int = 0
    moved_requests: int = 0
    kills: int = 0
    interrupted: int = 0
    failed_moves: list[str] = field(default_factory=list)

    def add(self, moved: Outcome, disturbed: Disturbed) -> None:
        """Set the outcome of the run against the fleet."""
        self.moved = moved
        self.moves = disturbed.moves.total()
        self.moved_requests = len(+disturbed.moves)
        self.kills, self.interrupted = disturbed.kills, disturbed.interrupted
        self.failed_moves = disturbed.failed

    @property
    def compared(self) -> int:
        """The number of answers and errors of both runs."""
        return len(self._names())

    def differences(self) -> dict[str, str]:
        """Return what differs between the two runs, by name."""
        if self.plain is None or self.moved is None:
            return {}
        pairs = {name: (self.plain.result(name), self.moved.result(name)) for name in self._names()}
        if self.plain.requests != self.moved.requests:
            pairs["requests"] = (self.plain.requests, self.moved.requests)
        return {name: _difference(one, other) for name, (one, other) in pairs.items() if one != other}

    def _names(self) -> list[str]:
        runs = [run for run in (self.plain, self.moved) if run is not None]
        return sorted({name for run in runs for name in (*run.answers, *run.errors)})

    @property
    def passed(self) -> bool:
        """Whether requests moved, one worker was killed, and only known results differ."""
        complete = self.plain is not None and self.moved is not None and not self.failed
        return (
            complete
            and self.compared > 0
            and self.moves > 0
            and self.kills == 1
            and self.differences().keys() <= set(self.known)
        )

    def as_json(self) -> dict[str, Any]:
        """Return the row with what differs."""
        return asdict(self) | {"passed": self.passed, "differences": self.differences()}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Self:
        """Return the row that `as_json` saved."""
        fields = {name: value for name, value in saved.items() if name not in ("passed", "differences")}
        for run in ("plain", "moved"):
            fields[run] = Outcome(**fields[run]) if fields[run] else None
        return cls(**fields)


def _difference(one: object, other: object) -> str:
    """Return the first place where two results differ, with what is there."""
    first, second = str(one), str(other)
    same = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    at = min(len(first), len(second)) if same is None else same
    start = max(0, at - _SHOWN // 4)
    return f"at {at}: {first[start : start + _SHOWN]!r} against {second[start : start + _SHOWN]!r}"
