"""What a workload is: requests in the order of arrival, and where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.request import SimRequest


class WorkloadError(Exception):
    """A workload cannot be had; the message names the file, the line and the field, or the wrong setting."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of arrival. `source` says where they come from, in words for a reader."""

    name: str
    requests: Sequence[SimRequest]
    source: str
