"""What a worker is given, beside its engine's settings."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.intra.base import ENGINE_ORDER
from tailrace.profiles import Profile
from tailrace.service.message_stream import DEFAULT_MAX_MESSAGE_BYTES
from worker_agent.kv.binding import PortRange
from worker_agent.migration.link_budget import SHARE


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Times in seconds, sizes in bytes."""

    # Where front ends attach; 0: any free port.
    stream_port: int = 0
    # What KV transfer is bound to: an address of this machine; None: what the worker listens on.
    kv_address: str | None = None
    # TCP ports for KV transfer; None: any free ones.
    kv_ports: PortRange | None = None
    # Whether KV leaves this host encrypted, and is fetched from others only so.
    encrypt_kv: bool = False
    # Largest message that front ends may send: a submission with its prompt.
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    # Requests that may be here at a time, waiting or running; more are placed elsewhere, or refused.
    max_requests: int = 8192
    # Between two steady reports to the monitor.
    report_s: float = 0.5
    # How long the etcd lease outlives a worker that died.
    lease_ttl_s: float = 10.0
    # A front end from which nothing was heard for so long is given up.
    frontend_silence_s: float = 10.0
    # An import that was asked for without a limit of its own.
    import_timeout_s: float = 10.0
    # A prefix that has not come from another worker by then is computed.
    pull_timeout_s: float = 5.0
    # A source that is paused longer asks the front end whether to go on.
    pause_limit_s: float = 10.0
    # An export whose target says nothing for so long, before the pause, is ended.
    export_idle_s: float = 30.0
    # The engine's order of its requests: a name of tailrace.intra.registry, or intra_switch.BY_POLICY.
    intra: str = ENGINE_ORDER
    # Step times of this model on this machine; None: as measured, else the engine's own, if it
    # knows them.
    profile: Profile | None = None
    # Measure the engine before joining, unless one of its kind has been.
    profile_at_start: bool = False
    # Share of the link's time for incoming transfers that nobody waits for; 1: all of it.
    migration_bandwidth_share: float = SHARE
    # Waiting for the front end's word on an adoption, which itself may take 2 s.
    adopt_timeout_s: float = 10.0
    # Once told to stop: for its requests to be moved; what is left then is handed back to be computed anew.
    drain_timeout_s: float = 60.0
    # An engine that has requests to run and ends no step for too long hangs: the worker ends. How long
    # that is follows from the steps so far (progress.py), within these bounds.
    step_floor_s: float = 30.0
    step_limit_s: float = 300.0
