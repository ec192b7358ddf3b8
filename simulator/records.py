"""What a simulation yields. Times in seconds from its start; None: it did not happen."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tailrace.cluster import Pool, Stage


@dataclass(frozen=True, slots=True)
class PlacementRecord:
    """A request got an instance: on arrival, when it was handed back, or by a committed migration."""

    at_s: float
    instance_id: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request from arrival to its end."""

    request_id: str
    arrival_s: float
    prompt_tokens: int
    reasoning_tokens: int
    answer_tokens: int
    # Reason given by the policy; "": the request was placed.
    refused: str
    placements: tuple[PlacementRecord, ...]
    # First output token of any kind, first answering token, last token.
    first_token_s: float | None
    first_answer_s: float | None
    finish_s: float | None
    # Submit to first answering token.
    ttft_s: float | None
    # Mean time between answering tokens; 0.0 for an answer of one token.
    tpot_s: float | None
    # Ratio of areas from the first answering token on (PASCAL, section V-A).
    qoe: float | None
    # Time between consecutive answering tokens.
    gap_p99_s: float | None
    gap_max_s: float | None
    migrations: int
    # Time that migrations kept the request from decoding, summed.
    pause_s: float
    preemptions_swapped: int
    preemptions_recomputed: int
    # From the last reasoning token to the start of the step that makes the first answering token.
    answer_blocking_s: float | None
    # From arrival to the start of the first step that prefills it.
    queue_s: float | None
    # Prompt tokens that were found in the prefix cache; and of them those that were loaded from host memory.
    cached_tokens: int = 0
    loaded_tokens: int = 0

    @property
    def output_tokens(self) -> int:
        """Reasoning and answer together."""
        return self.reasoning_tokens + self.answer_tokens

    @property
    def instance_id(self) -> str | None:
        """Where it was placed last."""
        return self.placements[-1].instance_id if self.placements else None

    @property
    def latency_s(self) -> float | None:
        """Submit to last token."""
        return None if self.finish_s is None else self.finish_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class PullRecord:
    """A prefix that was fetched from another instance, for one request or several, or ahead of need."""

    source_id: str
    target_id: str
    asked_s: float
    end_s: float
    # 0: the source had nothing of it any more.
    tokens: int
    bytes_sent: int
    # That waited for it.
    requests: int
    # A policy had it copied before anybody asked.
    ahead: bool = False


class MigrationOutcome(enum.Enum):
    """How a migration that a policy asked for ended."""

    COMMITTED = "committed"
    # The request finished, or was preempted, before it was over there.
    OVERTAKEN = "overtaken"
    # Too many at a time, one of the request is open, or the request is not where the policy thought.
    REFUSED = "refused"
    # No room on the target.
    NO_ROOM = "no_room"


@dataclass(frozen=True, slots=True)
class MigrationRecord:
    """One migration that a policy asked for."""

    request_id: str
    source_id: str
    target_id: str
    reason: str
    asked_s: float
    end_s: float
    outcome: MigrationOutcome
    # Refusal in words, for a reader.
    detail: str
    context_tokens: int
    bytes_sent: int
    rounds: int
    # Waiting for room at the target, transferring, and the part of it with the request paused.
    queued_s: float
    transfer_s: float
    pause_s: float


@dataclass(frozen=True, slots=True)
class StageChange:
    """The stages from this time on."""

    at_s: float
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class PoolChange:
    """The pool of an instance from this time on."""

    at_s: float
    instance_id: str
    pool: Pool | None


@dataclass(frozen=True, slots=True)
class Series:
    """Samples at `times_s` (shape [T]); other arrays have shape [T, instances], in instance order."""

    instance_ids: tuple[str, ...]
    times_s: NDArray[np.float64]
    kv_used_tokens: NDArray[np.int64]
    host_kv_tokens: NDArray[np.int64]
    # Requests decoding, prefilling or ready to, and all others held.
    decoding: NDArray[np.int64]
    prefilling: NDArray[np.int64]
    waiting: NDArray[np.int64]
    # Seconds of the last decode step begun by then; 0.0: idle.
    step_s: NDArray[np.float64]
    # Every change of the pools and stages, the initial ones at time 0 first; kept without sampling too.
    pools: tuple[PoolChange, ...]
    stages: tuple[StageChange, ...]


@dataclass(frozen=True, slots=True)
class SimResult:
    """A finished simulation. `requests` in the order given."""

    requests: list[RequestRecord]
    migrations: list[MigrationRecord]
    series: Series
    events_processed: int
    # Time of the last event.
    end_s: float
    # Prefixes that were fetched from other instances.
    pulls: list[PullRecord] = field(default_factory=list)
