"""Settings of a worker besides those of its engine, and the options of its command."""

from __future__ import annotations

from dataclasses import dataclass

import click

from tailrace.handover import ADOPT_S
from tailrace.intra.base import ENGINE_ORDER
from tailrace.intra.registry import intra_names
from tailrace.numeric import Duration, RealRange, WholeRange
from tailrace.profiles import Profile, ProfileError, load_profile
from tailrace.service.message_stream import DEFAULT_MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES, MIN_MESSAGE_BYTES
from tailrace.service.settings import Parsed, setting
from worker_agent.intra_switch import BY_POLICY
from worker_agent.migration.copying import SHARE
from worker_agent.network import BindingError, PortRange
from worker_agent.prefixes.loans import LOAN_MAX_S


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Times in seconds, sizes in bytes."""

    intra: str = setting(
        ENGINE_ORDER,
        "Order in which the engine serves requests; `policy`: the order that belongs to the fleet's policy.",
        type=click.Choice([BY_POLICY, *intra_names()]),
    )
    stream_port: int = setting(
        0, "Port that front ends connect to; 0: any free port.", type=WholeRange(0, 65535)
    )
    kv_address: str | None = setting(
        None,
        "Address whose network device KV transfer is bound to; default: that of --listen.",
        metavar="HOST",
    )
    kv_ports: PortRange | None = setting(
        None,
        "TCP ports for KV transfer, one per network device; default: any free ports.",
        type=Parsed(PortRange.parse, BindingError),
        metavar="LOW-HIGH",
        rare=True,
    )
    encrypt_kv: bool = setting(
        False,
        "Encrypt KV that leaves this host, and accept only encrypted KV from other hosts; for KV in host "
        "memory.",
        is_flag=True,
    )
    max_message_bytes: int = setting(
        DEFAULT_MAX_MESSAGE_BYTES,
        "Largest message accepted from front ends: a request with its prompt.",
        type=WholeRange(MIN_MESSAGE_BYTES, MAX_MESSAGE_BYTES),
        rare=True,
    )
    max_requests: int = setting(
        8192,
        "Maximum requests on this worker, waiting or running.",
        type=WholeRange(min=1),
        rare=True,
    )
    report_s: float = setting(
        0.5, "Seconds between periodic reports.", "--report-interval", rare=True, type=Duration(min=0.01)
    )
    # When an engine that has requests to run but finishes no step counts as hung: progress.py.
    step_limit_s: float = setting(
        300.0,
        "Seconds without a finished step after which an engine with requests to run always counts as hung.",
        "--step-limit",
        rare=True,
        type=Duration(min=1),
    )
    step_floor_s: float = setting(
        30.0,
        "Minimum of the same limit when derived from recent steps (ten times the longest of its kind).",
        "--step-floor",
        rare=True,
        type=Duration(min=1),
    )
    drain_timeout_s: float = setting(
        60.0,
        "On SIGTERM, how long its requests may take to migrate; the rest is recomputed elsewhere.",
        "--drain-timeout",
        type=Duration(min=0),
        metavar="SECONDS",
    )
    pull_timeout_s: float = setting(
        5.0,
        "How long a pull of a prefix from another worker may take; after that the prompt is computed.",
        "--pull-timeout",
        rare=True,
        # No holder lends for longer.
        type=Duration(min=0, min_open=True, max=LOAN_MAX_S),
        metavar="SECONDS",
    )
    migration_bandwidth_share: float = setting(
        SHARE,
        "Share of link time for incoming KV that no user waits for (rescheduling); 1: no limit.",
        type=RealRange(min=0, min_open=True, max=1),
        rare=True,
    )
    profile: Profile | None = setting(
        None,
        "Step times of the model on this machine, instead of measured ones (tailrace profile).",
        type=Parsed(load_profile, ProfileError),
        metavar="NAME|PATH",
    )
    profile_at_start: bool = setting(
        False,
        "Profile the engine before joining the fleet, unless its kind already has a profile; takes about "
        "a minute.",
        is_flag=True,
    )
    # Time to live of the etcd lease.
    lease_ttl_s: float = 10.0
    # Timeout of an import whose request does not set one.
    import_timeout_s: float = 10.0
    # A source that is paused longer asks the front end whether to resume.
    pause_limit_s: float = 10.0
    # Timeout of the front end's reply to an adoption, for which it may itself wait 2 s.
    adopt_timeout_s: float = ADOPT_S
