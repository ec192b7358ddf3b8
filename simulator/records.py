"""Results of a simulation. Times are in seconds from its start; None: it did not happen."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tailrace.cluster import Pool, Stage


@dataclass(frozen=True, slots=True)
class PlacementRecord:
    """A request was assigned to an instance: on arrival, after a hand-back, or by a committed migration."""

    at_s: float
    instance_id: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request from arrival to end."""

    request_id: str
    arrival_s: float
    prompt_tokens: int
    reasoning_tokens: int
    answer_tokens: int
    # Why it was refused; "": it was not.
    refused: str
    placements: tuple[PlacementRecord, ...]
    # First output token of any kind, first answering token, last token.
    first_token_s: float | None
    first_answer_s: float | None
    finish_s: float | None
    # Arrival to first answering token.
    ttft_s: float | None
    # Mean time between answering tokens; 0.0 for an answer of one token.
    tpot_s: float | None
    # Ratio of areas from the first answering token on (PASCAL, section V-A).
    qoe: float | None
    migrations: int
    # Total time that migrations kept the request from decoding.
    pause_s: float
    preemptions_swapped: int
    preemptions_recomputed: int
    # From the last reasoning token to the start of the step that yields the first answering token.
    answer_blocking_s: float | None
    # From arrival to the start of the first step that prefills it.
    queue_s: float | None
    # Prompt tokens found in a prefix cache, and the part of them loaded from host memory.
    cached_tokens: int = 0
    loaded_tokens: int = 0

    @property
    def output_tokens(self) -> int:
        """Return the number of reasoning and answer tokens."""
        return self.reasoning_tokens + self.answer_tokens

    @property
    def instance_id(self) -> str | None:
        """Return the last instance on which it was placed; None if it was refused."""
        return self.placements[-1].instance_id if self.placements else None

    @property
    def latency_s(self) -> float | None:
        """Return the seconds from arrival to last token; None if it did not finish."""
        return None if self.finish_s is None else self.finish_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class PullRecord:
    """A prefix fetched from another instance, for one or several requests or ahead of need."""

    source_id: str
    target_id: str
    requested_s: float
    end_s: float
    # 0: the source no longer held any of it.
    tokens: int
    bytes_sent: int
    # Requests that waited for it.
    requests: int
    # Copied by a policy ahead of any request.
    ahead: bool = False


class MigrationOutcome(enum.Enum):
    """How a requested migration ended."""

    COMMITTED = "committed"
    # The request finished or was preempted first.
    OVERTAKEN = "overtaken"
    # The queue is full or too slow, the request is already migrating, or it is not where the policy expected
    # it.
    REFUSED = "refused"
    # The target has no room.
    NO_ROOM = "no_room"


@dataclass(frozen=True, slots=True)
class MigrationRecord:
    """One migration that a policy requested."""

    request_id: str
    source_id: str
    target_id: str
    reason: str
    requested_s: float
    end_s: float
    outcome: MigrationOutcome
    # The reason for its failure in words.
    detail: str
    context_tokens: int
    bytes_sent: int
    rounds: int
    # Time of the transfer, and the part of it with the request paused.
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
    # Requests decoding, prefilling (or ready to), and all others.
    decoding: NDArray[np.int64]
    prefilling: NDArray[np.int64]
    waiting: NDArray[np.int64]
    # Duration in seconds of the last decode step begun; 0.0: idle.
    step_s: NDArray[np.float64]
    # Every change of pools and stages, starting with the initial ones at time 0; kept even without sampling.
    pools: tuple[PoolChange, ...]
    stages: tuple[StageChange, ...]


@dataclass(frozen=True, slots=True)
class SimResult:
    """A finished simulation. `requests` are in the order given."""

    requests: list[RequestRecord]
    migrations: list[MigrationRecord]
    series: Series
    events_processed: int
    # Time of the last event.
    end_s: float
    # Prefixes fetched from other instances.
    pulls: list[PullRecord] = field(default_factory=list)
