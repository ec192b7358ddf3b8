"""Settings of a worker besides those of its engine."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.handover import ADOPT_S
from tailrace.intra.base import ENGINE_ORDER
from tailrace.profiles import Profile
from tailrace.service.message_stream import DEFAULT_MAX_MESSAGE_BYTES
from worker_agent.kv.binding import PortRange
from worker_agent.migration.link_budget import SHARE


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Times in seconds, sizes in bytes."""

    # Port on which front ends attach; 0: any free port.
    stream_port: int = 0
    # Address of this machine that KV transfer binds to; None: the one that the worker listens on.
    kv_address: str | None = None
    # TCP ports for KV transfer; None: any free ports.
    kv_ports: PortRange | None = None
    # Whether KV leaves this host encrypted only, and is fetched from other hosts only so.
    encrypt_kv: bool = False
    # Largest message that front ends may send: a submission with its prompt.
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    # Most requests here at a time, waiting or running; more are placed elsewhere, or refused.
    max_requests: int = 8192
    # Interval of steady reports to the monitor.
    report_s: float = 0.5
    # Time to live of the etcd lease.
    lease_ttl_s: float = 10.0
    # A front end from which nothing arrives for this long is disconnected.
    frontend_silence_s: float = 10.0
    # Timeout of an import whose request does not set one.
    import_timeout_s: float = 10.0
    # Time after which a prefix that is pulled from another worker is computed instead.
    pull_timeout_s: float = 5.0
    # A source that is paused longer asks the front end whether to resume.
    pause_limit_s: float = 10.0
    # An export whose target is silent for this long before the pause is ended.
    export_idle_s: float = 30.0
    # The engine's batch order: a name of tailrace.intra.registry, or intra_switch.BY_POLICY.
    intra: str = ENGINE_ORDER
    # Profile of this model on this machine; None: the measured one, else the engine's own, if it has one.
    profile: Profile | None = None
    # Profile the engine before joining, unless one of its kind has been profiled.
    profile_at_start: bool = False
    # Share of the link's time for incoming background transfers; 1: all of it.
    migration_bandwidth_share: float = SHARE
    # Timeout of the front end's reply to an adoption, for which it may itself wait 2 s.
    adopt_timeout_s: float = ADOPT_S
    # Time for its requests to be moved once it is told to stop; the rest is handed back to be recomputed.
    drain_timeout_s: float = 60.0
    # Bounds of the time after which an engine that has requests to run but finishes no step counts as hanging
    # (progress.py).
    step_floor_s: float = 30.0
    step_limit_s: float = 300.0
