"""Settings of one front end, as given on its command line."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from frontend_svc.api_server.spec import (
    DEFAULT_BODY_LIMITS,
    DEFAULT_CONNECTION_LIMITS,
    BodyLimits,
    ConnectionLimits,
)
from tailrace.service.message_stream import DEFAULT_MAX_MESSAGE_BYTES

DRAIN_TIMEOUT_S: Final = 300.0
"""Time for streams in progress to finish once a front end is told to stop: a long answer takes minutes."""

DEFAULT_KEEP_ANSWERS_BYTES: Final = 256 << 20
"""Enough for some thousands of long answers."""


class Front(enum.Enum):
    """Which API server is started."""

    PYTHON = "python"
    RUST = "rust"
    # None is started: another process runs one over the sockets in `ipc_folder`.
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a front end holds at most; more is refused."""

    # Largest message that workers may send: one step's outputs.
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    # Streams in any state: a new one is refused with 429.
    max_streams: int = 16_384
    # Streams that wait for an instance: a new one is refused with 503.
    max_unplaced: int = 8_192
    # Prompt tokens without a first token yet, per instance: further requests wait for their tenant's turn. 0:
    # none waits.
    fair_backlog_tokens: int = 0
    # Waiting requests of one tenant: a new one is refused with 429.
    max_waiting: int = 1_024


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """Seconds that a stream may wait for an instance when none can take it; then it ends with an error."""

    # A stream that no engine has had yet: its client can be told to try again (`--place-wait`).
    place_s: float = 5.0
    # A stream that an engine had: the client waits for an answer that had begun, or was about to
    # (`--resume-wait`).
    resume_s: float = 60.0


DEFAULT_PLACE_WAIT_S: Final[Mapping[Front, float]] = {
    Front.PYTHON: WaitLimits().place_s,
    # It answers 200 first and has no way to tell a client to try again, so it waits for longer than the
    # restart of an instance takes.
    Front.RUST: 30.0,
    Front.NONE: WaitLimits().place_s,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """One front end."""

    frontend_id: str
    # HOST:PORT as requested; port 0: any free one.
    http: str
    front: Front
    model: str
    served_model_name: str
    reasoning_parser: str
    vllm_arguments: tuple[str, ...]
    vllm_rs: Path
    # Folder of the engine core's sockets; None: a private temporary folder.
    ipc_folder: Path | None
    wait_limits: WaitLimits
    # Seconds for streams in progress to finish once it is told to stop.
    drain_timeout_s: float = DRAIN_TIMEOUT_S
    # Seconds per token at which answers are shown to users; 0: as they are made.
    pace_s: float = 0.0
    limits: Limits = Limits()
    # File of tenants and keys; None: no key is required but vLLM's own.
    api_keys: Path | None = None
    connections: ConnectionLimits = DEFAULT_CONNECTION_LIMITS
    body_limits: BodyLimits = DEFAULT_BODY_LIMITS
    # Seconds for which an answer is kept once no client reads it; 0: none is kept.
    keep_answers_s: float = 0.0
    # Memory for all kept answers together.
    keep_answers_bytes: int = DEFAULT_KEEP_ANSWERS_BYTES
