"""The immutable view of the cluster on which a policy decides.

Pure data: no I/O, no clock. The live scheduler builds it from worker reports, the simulator from its own
state; both pass the same types to the same policies. Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from tailrace.lengths import LengthStatistics
    from tailrace.perf.measured import Measured
    from tailrace.perf.ttft import TtftPredictor


class Phase(enum.Enum):
    """The phase of a request."""

    PREFILL = "prefill"
    REASONING = "reasoning"
    ANSWERING = "answering"


class Pool(enum.Enum):
    """Elastic pools (Arrow, section 5). An instance in no pool does both kinds of work."""

    PREFILL = "prefill"
    DECODE = "decode"
    PREFILL_TO_DECODE = "prefill_to_decode"
    DECODE_TO_PREFILL = "decode_to_prefill"


class InstanceState(enum.Enum):
    """Whether an instance may get new requests."""

    ACTIVE = "active"
    DRAINING = "draining"
    SUSPECT = "suspect"


class RequestState(enum.Enum):
    """The state of a request inside its instance's engine."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request as last reported by its instance."""

    request_id: str
    instance_id: str
    phase: Phase
    state: RequestState
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    epoch: int = 0
    reasoning_tokens: int = 0
    # KV blocks held, in tokens of capacity.
    kv_tokens: int = 0
    # KV in host memory of a request that was preempted, in tokens of capacity.
    host_kv_tokens: int = 0
    arrival_s: float = 0.0
    token_interval_s: float = 0.0
    frontend_id: str = ""
    # Whether it is being migrated; another migration must not be started.
    migrating: bool = False
    # Tokens ready for the user beyond what the user should have read by now (PASCAL's token pacer). None:
    # unknown; negative: behind.
    pacer_slack_tokens: float | None = None
    # Predicted remaining tokens (ARES, section 4). None: no prediction.
    predicted_remaining_tokens: float | None = None
    # Tokens generated in the current phase; below one quantum the request is "fresh" (PASCAL, Alg. 2's a_i).
    phase_tokens: int = 0
    # A reasoning request that the intra-instance scheduler treats as answering (PASCAL, section IV-C).
    demoted: bool = False
    # QoE of the answer so far (tailrace/qoe.py). None: unknown, or no answer yet.
    qoe: float | None = None

    @property
    def context_tokens(self) -> int:
        """Return the number of prompt and output tokens so far."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class PhaseLoad:
    """The counts that PASCAL's instance selection uses (Algorithms 1 and 2)."""

    # r_i: requests in prefill or reasoning that are not demoted.
    reasoning: int = 0
    # a_i: answering requests that have not used up their first quantum.
    fresh_answering: int = 0
    # The smallest pacer slack of all answering requests; infinite: none is known to be behind.
    least_pacer_slack_tokens: float = math.inf
    # Output tokens of the quantum by which `fresh_answering` was counted; 0: unknown.
    quantum_tokens: int = 0


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One instance as last reported, including what the scheduler has placed on it since."""

    instance_id: str
    state: InstanceState = InstanceState.ACTIVE
    pool: Pool | None = None
    # KV capacity and use, in tokens.
    kv_capacity_tokens: int = 0
    kv_used_tokens: int = 0
    block_tokens: int = 16
    max_model_len: int = 0
    # Largest number of requests in a batch; 0: unknown.
    max_num_seqs: int = 0
    running: int = 0
    waiting: int = 0
    # Prompt tokens that are not prefilled yet, and tokens of all requests on it.
    prefill_backlog_tokens: int = 0
    context_tokens: int = 0
    token_interval_s: float = 0.0
    # KV swapped out to host memory, in tokens.
    host_kv_tokens: int = 0
    # Host memory for KV, including that of migrated requests, in tokens. 0: only the device holds KV.
    host_kv_capacity_tokens: int = 0
    # Seconds until a prefill that arrives now would start (Arrow, section 5.3). None: derive from backlog.
    prefill_delay_s: float | None = None
    # Predictor of the seconds that a prompt alone takes there, as reported. None: not reported.
    ttft: TtftPredictor | None = None
    # Most tokens in the running batch that keep the TPOT SLO (Arrow, Alg. 2). None: KV capacity.
    max_running_tokens: int | None = None
    # Token load now and at the coming steps of the prediction horizon, simulated by the worker (ARES,
    # section 5.2; tailrace.perf.horizon).
    future_load: tuple[float, ...] = ()
    # Measurements of its kind (`tailrace profile`). None: none; policies use their own profile.
    measured: Measured | None = None
    migrations_in: int = 0
    migrations_out: int = 0
    # Context of requests that are migrating to it; not in `context_tokens`.
    coming_tokens: int = 0
    # Tokens of KV per second that recent migrations to it have reached. None: none yet.
    migration_tokens_per_s: float | None = None
    # Live and simulated, views of requests are created only on access: most decisions need only counts and
    # columns (tailrace.policy.requests).
    requests: Sequence[RequestView] = ()

    @property
    def kv_free_tokens(self) -> int:
        """Return the free KV capacity in tokens."""
        return self.kv_capacity_tokens - self.kv_used_tokens

    @property
    def load(self) -> int:
        """Return the number of requests running or waiting."""
        return self.running + self.waiting


@dataclass(frozen=True, slots=True)
class Stage:
    """A half-open range of lengths [lo, hi) in tokens and the instances that serve it."""

    lo: int
    hi: int
    instance_ids: tuple[str, ...]


LENGTH_MAX: Final = 2**32 - 1
"""The end of the longest stage at most: what the messages carry."""


class StagesError(ValueError):
    """Stages that contradict each other, or name nothing; the message names the field."""


class UnknownStageInstance(StagesError):
    """A stage names an instance that does not exist; the message names the field."""


def check_stages(stages: Sequence[Stage], instances: Container[str]) -> None:
    """Check that ranges ascend without overlap, each with instances of these and none in two. No stages are
    valid stages.

    Raise StagesError.
    """
    end = 0
    placed: set[str] = set()
    for number, stage in enumerate(stages):
        field = f"stages[{number}]"
        if stage.lo >= stage.hi:
            raise StagesError(f"{field}.hi: {stage.hi} must be greater than lo, {stage.lo}")
        if stage.hi > LENGTH_MAX:
            raise StagesError(f"{field}.hi: {stage.hi} must be at most {LENGTH_MAX}")
        if stage.lo < end:
            raise StagesError(f"{field}.lo: {stage.lo} lies in the stage before, which ends at {end}")
        end = stage.hi
        if not stage.instance_ids:
            raise StagesError(f"{field}.instance_ids: must not be empty")
        for instance_id in stage.instance_ids:
            if not instance_id:
                raise StagesError(f"{field}.instance_ids: must not be empty")
            if instance_id not in instances:
                raise UnknownStageInstance(f"{field}.instance_ids: no instance {instance_id!r}")
            if instance_id in placed:
                raise StagesError(f"{field}.instance_ids: {instance_id!r} is named twice")
            placed.add(instance_id)


class CachedTokens(NamedTuple):
    """The tokens at the beginning of a prompt whose KV an instance is known to hold."""

    # On its device.
    device: int
    # On its device or in its host memory.
    total: int
    # Those of the total that it has reported, excluding what was placed there a moment ago.
    reported: int = 0


NOTHING_HELD: Final = CachedTokens(0, 0)


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A prefix that several recent arrivals share."""

    tokens: int
    # Number of arrivals in the period that begin with it.
    hits: int
    # What each instance holds of it; a copy in progress counts as held, but not as reported.
    cached: Mapping[str, CachedTokens]
    # The latest of these arrivals on each instance.
    requests: Mapping[str, str]
    # Instances that can exchange the KV.
    instances: frozenset[str]


@dataclass(frozen=True, slots=True)
class HotPrefixes:
    """The hot prefixes of the last `period_s` seconds, those with the most requested tokens first."""

    period_s: float
    prefixes: tuple[HotPrefix, ...]
    # Instances to which a copy is or was recently in progress.
    copying: frozenset[str]


# Renewals of instances that are remembered: many times those between two decisions.
_CHANGES_MAX: Final = 8_192


class ViewChanges:
    """Which instances differ between two views that one model made of the same instances.

    It saves caches of what was read from a view from comparing all instances. Versions are numbers of
    renewals.
    """

    def __init__(self) -> None:
        self._renewed: list[str] = []
        # Renewals that are not remembered any more.
        self._forgotten = 0

    @property
    def version(self) -> int:
        """Return the version of a view made now."""
        return self._forgotten + len(self._renewed)

    def add(self, instance_ids: Iterable[str]) -> None:
        """Record that these instances were renewed."""
        self._renewed.extend(instance_ids)
        if len(self._renewed) > _CHANGES_MAX:
            surplus = len(self._renewed) - _CHANGES_MAX // 2
            del self._renewed[:surplus]
            self._forgotten += surplus

    def between(self, one: int, other: int) -> set[str] | None:
        """Return the instances that differ between views of two versions; None: not remembered any more."""
        first, last = min(one, other), max(one, other)
        if first < self._forgotten:
            return None
        return set(self._renewed[first - self._forgotten : last - self._forgotten])


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Everything that a policy may look at. `instances` iterates in instance-id order."""

    instances: Mapping[str, InstanceView]
    stages: tuple[Stage, ...] = ()
    # Only in views for on_tick: the time of this policy's previous tick, by the clock of `now`, from which
    # CascadeInfer counts its periods. None: the first tick since this scheduler began to use this policy.
    last_tick_s: float | None = None
    # Only in views for on_tick: lengths of the requests of the last `Policy.lengths_period_s`, or of a
    # shorter time if this scheduler has used this policy for less. None: the policy does not use them.
    lengths: LengthStatistics | None = None

    # Only in views for on_tick: prefixes shared by many arrivals of the last `Policy.prefixes_period_s`.
    # None: the policy does not use them.
    hot: HotPrefixes | None = None
    # Says by versions in which instances views with the same `changes` differ; None: unknown.
    # Affects no decision.
    changes: ViewChanges | None = field(default=None, compare=False, repr=False)
    version: int = field(default=0, compare=False, repr=False)

    def placeable(self) -> list[InstanceView]:
        """Return instances that may get new requests, in instance-id order."""
        active = InstanceState.ACTIVE
        return [i for i in self.instances.values() if i.state is active]


NOTHING_CACHED: Final[Mapping[str, CachedTokens]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that needs an instance: as its front end asked, and completed by the scheduler (`seq`,
    `cached`)."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    # Number of placements that this scheduler has made; a stateless round-robin uses it.
    seq: int = 0
    # Above 0: the request continues after its instance was lost, with this many tokens already delivered.
    output_tokens: int = 0
    excluded: frozenset[str] = frozenset()
    # What each instance has cached of its prompt and delivered tokens, without those that hold or report
    # nothing.
    cached: Mapping[str, CachedTokens] = field(default_factory=dict)
    # Names of its leading blocks (tailrace.cache.names), and their size in tokens, if known.
    block_names: Sequence[int] = ()
    block_tokens: int = 0
    # The conversation that it belongs to; empty: unknown.
    session_id: str = ""
    # It has been on an instance before.
    admitted: bool = False
    # Key of the model that may answer; empty: any.
    model: str = ""
    frontend_id: str = ""

    def completed(self, seq: int, cached: Mapping[str, CachedTokens]) -> Arrival:
        """Return the arrival with what only the scheduler knows."""
        # At each placement: `dataclasses.replace` takes twice as long.
        return Arrival(
            self.request_id,
            self.prompt_tokens,
            self.max_tokens,
            seq,
            self.output_tokens,
            self.excluded,
            cached,
            self.block_names,
            self.block_tokens,
            self.session_id,
            self.admitted,
            self.model,
            self.frontend_id,
        )

    @property
    def context_tokens(self) -> int:
        """Return the number of prompt and delivered tokens."""
        return self.prompt_tokens + self.output_tokens

    def cached_tokens(self, instance_id: str) -> int:
        """Return the tokens whose KV is on an instance's device."""
        return self.held_on(instance_id).device

    def held_on(self, instance_id: str) -> CachedTokens:
        """Return what an instance holds."""
        return self.cached.get(instance_id, NOTHING_HELD)

    def found_tokens(self, instance_id: str, pull_from: str) -> int:
        """Return the tokens that need not be computed on an instance, including those in its host memory, if
        the prefix is also pulled from another instance (empty: from none)."""
        own = self.held_on(instance_id).total
        return max(own, self.reported_tokens(pull_from)) if pull_from else own

    def reported_tokens(self, instance_id: str) -> int:
        """Return the tokens whose KV can be pulled from an instance."""
        return self.held_on(instance_id).reported


def length_bounds(stages: Sequence[Stage]) -> dict[str, int]:
    """Return, by instance, the context in tokens from which a request on it has outgrown its stage.

    That is the end of the longest stage that the instance serves.
    """
    ends: dict[str, int] = {}
    for stage in stages:
        for name in stage.instance_ids:
            ends[name] = max(stage.hi, ends.get(name, 0))
    return ends
