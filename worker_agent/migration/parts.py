"""The parts of the worker that every export and import uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tailrace.perf.transfer_rate import TransferRate
from worker_agent.carried import CarriedRequests
from worker_agent.engine.base import Engine, EngineInfo, Submission
from worker_agent.faults import Faults
from worker_agent.frontends import FrontEnds
from worker_agent.id_claim import Addressee
from worker_agent.kv.address import BlockPuller, BlockSource
from worker_agent.metrics import WorkerMetrics
from worker_agent.migration.link_budget import LinkBudget
from worker_agent.migration.spans import TransferSpans
from worker_agent.phase_events import PhaseEvents
from worker_agent.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class TargetParts:
    """Parts used by an import."""

    own: Addressee
    engine: Engine
    info: EngineInfo
    puller: BlockPuller
    front_ends: FrontEnds
    carried: CarriedRequests
    events: PhaseEvents
    metrics: WorkerMetrics
    faults: Faults
    spans: TransferSpans
    settings: WorkerSettings
    # Submits a request that had to wait for the end of an import.
    resubmit: Callable[[Submission], None]
    # Limits background transfers.
    link: LinkBudget = field(default_factory=LinkBudget)
    # Rate of incoming KV, including waits for the link budget.
    incoming: TransferRate = field(default_factory=TransferRate)


@dataclass(frozen=True, slots=True)
class SourceParts:
    """Parts used by an export."""

    own: Addressee
    engine: Engine
    info: EngineInfo
    # Sends the blocks.
    blocks: BlockSource
    front_ends: FrontEnds
    carried: CarriedRequests
    events: PhaseEvents
    metrics: WorkerMetrics
    faults: Faults
    settings: WorkerSettings
