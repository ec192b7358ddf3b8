"""The maximum time each service takes to stop, by its defaults."""

from __future__ import annotations

from typing import Final

from frontend_svc.settings import DRAIN_TIMEOUT_S
from migration_svc.admission import Admission
from migration_svc.migration import CopyRules
from worker_agent.draining import HANDOVER_S
from worker_agent.settings import WorkerSettings

# For closing after the drain (tailrace.service.runtime).
_CLOSE_S: Final = 15.0
_DRAIN_S: Final = {
    "frontend": DRAIN_TIMEOUT_S,
    "worker": WorkerSettings().drain_timeout_s + HANDOVER_S,
    "migration": Admission().max_wait_s + CopyRules().timeout_s,
}


def longest_s(service: str) -> float:
    """Return the maximum stop time in seconds of a service, given its unit or container name."""
    kind = next((kind for kind in _DRAIN_S if service.removeprefix("tailrace-").startswith(kind)), "")
    return _DRAIN_S.get(kind, 0.0) + _CLOSE_S
