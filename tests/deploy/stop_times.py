"""How long each service may take to end once it is told to stop, by its own defaults."""

from __future__ import annotations

from typing import Final

from frontend_svc.settings import DRAIN_TIMEOUT_S
from migration_svc.admission import Admission
from migration_svc.migration import CopyRules
from worker_agent.draining import HANDOVER_S
from worker_agent.settings import WorkerSettings

# After the drain, for closing (tailrace.service.runtime).
_CLOSE_S: Final = 15.0
_DRAIN_S: Final = {
    "frontend": DRAIN_TIMEOUT_S,
    "worker": WorkerSettings().drain_timeout_s + HANDOVER_S,
    "migration": Admission().max_wait_s + CopyRules().timeout_s,
}


def longest_s(service: str) -> float:
    """Of a service by its kind, as units and containers are named."""
    kind = next((kind for kind in _DRAIN_S if service.removeprefix("tailrace-").startswith(kind)), "")
    return _DRAIN_S.get(kind, 0.0) + _CLOSE_S
