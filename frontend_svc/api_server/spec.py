"""The launch parameters of both kinds of API server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tailrace.numeric import Duration, WholeRange
from tailrace.service.settings import setting
from tailrace.service.vllm_line import NO_LINE, VllmLine

# An API server starts at once and waits for the first worker; the front end decides for how long, not vLLM.
READY_TIMEOUT_S: Final = 7 * 24 * 3600
KEEP_ALIVE_S: Final = 75
"""Idle HTTP connections, unless VLLM_HTTP_TIMEOUT_KEEP_ALIVE says otherwise. vLLM's 5 s are shorter than
proxies reuse a connection (nginx and AWS's ALB: 60 s): a request sent on one just being closed is reset."""
DEFAULT_MAX_BODY_BYTES: Final = 64 << 20
"""A larger request would exceed what a worker accepts anyway."""
DEFAULT_MAX_HEADER_BYTES: Final = 64 << 10
"""A request's header, unless vLLM's --h11-max-incomplete-event-size says otherwise."""
ARGUMENTS_REFUSED: Final = 2
"""Exit status of an API server that has said on stderr which argument it refuses; click's, and vllm-rs's."""

ADAPTERS_GIVEN: Final = "tailrace_adapters_given"
"""Call of the API server to `frontend_svc`: names that it serves since its start (list of names)."""
ADAPTER_LOADED: Final = "tailrace_adapter_loaded"
"""Call of the API server to `frontend_svc`: it loaded an adapter (name, path, whether is_3d, whether in
place). The result is why it is refused; empty if it is recorded."""
ADAPTER_UNLOADED: Final = "tailrace_adapter_unloaded"
"""Call of the API server to `frontend_svc`: it unloaded an adapter (name). The result is empty."""
ADAPTER_CALLS: Final = frozenset({ADAPTERS_GIVEN, ADAPTER_LOADED, ADAPTER_UNLOADED})


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of connections that have not sent a whole header: they need no key."""

    # From the first byte of a header (of a new connection: from its beginning) to the last.
    header_timeout_s: float = setting(
        10.0,
        "How long a connection may take to send a request's header (--front python only).",
        "--header-timeout",
        rare=True,
        type=Duration(min=0.1),
        metavar="SECONDS",
    )
    max_pending: int = setting(
        1_000,
        "Maximum connections that have not sent a whole header (--front python only).",
        "--max-pending-connections",
        rare=True,
        type=WholeRange(min=1),
    )


DEFAULT_CONNECTION_LIMITS: Final = ConnectionLimits()


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What a user's request may ask for, with or without a key."""

    max_body_bytes: int = setting(
        DEFAULT_MAX_BODY_BYTES,
        "Largest body of a user's request (--front python only).",
        type=WholeRange(min=1024),
        rare=True,
    )
    max_text_bytes: int = setting(
        0,
        "Largest body without its images and other media; 0: 16 bytes for each token of the model's context, "
        "at least 1 MiB (--front python only).",
        type=WholeRange(min=0),
        rare=True,
    )
    max_messages: int = setting(
        2_048,
        "Most messages, content parts and tools of a request (--front python only).",
        type=WholeRange(min=1),
        rare=True,
    )
    max_sequences: int = setting(
        2_048,
        "Most sequences of a request: its prompts times n (--front python only).",
        type=WholeRange(min=1),
        rare=True,
    )
    max_bodies_bytes: int = setting(
        512 << 20,
        "Most bytes in the bodies of all requests in progress, half of them for one tenant (--front python "
        "only).",
        type=WholeRange(min=1024),
        rare=True,
    )
    body_timeout_s: float = setting(
        30.0,
        "Time for a request's body to arrive, besides a second for each 256 KiB (--front python only).",
        "--body-timeout",
        rare=True,
        type=Duration(min=0.1),
        metavar="SECONDS",
    )


DEFAULT_BODY_LIMITS: Final = BodyLimits()


@dataclass(frozen=True, slots=True)
class ApiServerSpec:
    """The user's choices."""

    # HOST:PORT with the port that is actually bound.
    http_address: str
    model: str
    # Seconds for responses in progress to finish once it is told to stop.
    drain_timeout_s: float = 0.0
    # Flags of `vllm serve`.
    line: VllmLine = NO_LINE
    # File of tenants and keys (tailrace/tenancy); None: no key is required but vLLM's own.
    api_keys: Path | None = None
    connections: ConnectionLimits = DEFAULT_CONNECTION_LIMITS
    limits: BodyLimits = DEFAULT_BODY_LIMITS
    # Whether requests carry their tenant to the engine core (tailrace/tenancy/keys.py).
    sends_tenants: bool = False
    # Whether clients can come back for their answers (frontend_svc/answers).
    keeps_answers: bool = False
    # File of the adapters that were loaded at run time (frontend_svc/adapters.py); None: they are not shared.
    adapters: Path | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line, additions to its environment, and the file descriptors that it inherits."""

    command: tuple[str, ...]
    env: dict[str, str]
    fds: tuple[int, ...]


def offline_env(spec: ApiServerSpec) -> dict[str, str]:
    """Return environment variables that keep a local model from contacting a hub, which costs seconds at each
    start."""
    return {"HF_HUB_OFFLINE": "1"} if Path(spec.model).is_dir() else {}
