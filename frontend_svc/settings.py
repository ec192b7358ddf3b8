"""Settings of one front end, and its command's options."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import msgspec

from frontend_svc.api_server.spec import (
    DEFAULT_BODY_LIMITS,
    DEFAULT_CONNECTION_LIMITS,
    BodyLimits,
    ConnectionLimits,
)
from tailrace.numeric import Duration, RealRange, WholeRange
from tailrace.service.message_stream import DEFAULT_MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES, MIN_MESSAGE_BYTES
from tailrace.service.settings import OneOf, setting
from tailrace.service.vllm_line import NO_LINE, VllmLine

# It answers 200 first and has no way to tell a client to try again, so it waits for longer than the restart
# of an instance takes.
_RUST_PLACE_S: Final = 30.0


class Front(enum.Enum):
    """Which API server is started."""

    PYTHON = "python"
    RUST = "rust"
    # None is started: another process runs one over the sockets in `ipc_folder`.
    NONE = "none"


class _Adapter(msgspec.Struct):
    name: str


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """Seconds that a stream may wait for an instance when none can take it; then it ends with an error."""

    # A stream that no engine has had yet: its client can be told to try again.
    place_s: float = setting(
        5.0,
        "Maximum seconds that a request waits for its first instance if there is none.  "
        f"[default: 5; {_RUST_PLACE_S:g} with --front rust]",
        "--place-wait",
        rare=True,
        type=Duration(min=0),
        show_default=False,
    )
    # A stream that an engine had: the client waits for an answer that had begun, or was about to.
    resume_s: float = setting(
        60.0,
        "The same for a request that an instance has started, when that instance is lost.",
        "--resume-wait",
        rare=True,
        type=Duration(min=0),
    )
    # A stream that no engine has had yet, where one is started for it.
    instance_s: float = setting(
        0.0,
        "How long a request waits for an instance of a model that may have none, because one is started when "
        "it is asked for; 0: none is, and without an instance new requests get 503.",
        "--instance-wait",
        type=Duration(min=0, max=86_400),
        metavar="SECONDS",
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """What a front end holds at most; more is refused."""

    max_streams: int = setting(
        16_384,
        "Maximum requests in progress.",
        type=WholeRange(min=1),
        rare=True,
    )
    max_unplaced: int = setting(
        8_192,
        "Maximum requests waiting for an instance.",
        type=WholeRange(min=1),
        rare=True,
    )
    max_message_bytes: int = setting(
        DEFAULT_MAX_MESSAGE_BYTES,
        "Largest message accepted from a worker: one step's outputs, with their log-probabilities.",
        type=WholeRange(MIN_MESSAGE_BYTES, MAX_MESSAGE_BYTES),
        rare=True,
    )
    fair_backlog_tokens: int = setting(
        0,
        "While prompts of this many tokens per instance have no first token yet, new requests wait for "
        "their tenant's turn; 0: off. Requires --api-keys.",
        "--fair-backlog",
        type=WholeRange(min=0),
        metavar="TOKENS",
    )
    # Waiting requests of one tenant: a new one is refused with 429.
    max_waiting: int = 1_024


@dataclass(frozen=True, slots=True)
class Settings:
    """One front end."""

    frontend_id: str = ""
    # Port 0: any free one.
    http: str = setting(
        "127.0.0.1:8000",
        "Address for users; beyond loopback it requires API keys (or --insecure).",
        metavar="HOST:PORT",
    )
    front: Front = setting(
        Front.PYTHON,
        "vLLM's API server: its Python app, vllm-rs, or none (run one yourself, see --ipc).",
        type=OneOf(Front),
    )
    on_demand: bool = setting(
        False,
        "Start the API server when the first connection comes; it waits until it is answered.",
        is_flag=True,
        rare=True,
    )
    model: str = setting("", "Model folder or name.  [default: the tiny reasoning model]", metavar="PATH")
    # Flags of `vllm serve` for the API server.
    line: VllmLine = NO_LINE
    vllm_rs: Path | None = setting(
        None,
        "Executable for --front rust.  [default: the one on PATH or next to this Python]",
        type=click.Path(dir_okay=False, path_type=Path),
        rare=True,
    )
    ipc_folder: Path | None = setting(
        None,
        "Folder for the engine core's sockets.  [default: a private one]",
        "--ipc",
        rare=True,
        type=click.Path(file_okay=False, path_type=Path),
    )
    wait_limits: WaitLimits = WaitLimits()
    pace_tpot_ms: float | None = setting(
        None,
        "Minimum milliseconds per token at which answers are shown; 0: no pacing.  [default: the policy's]",
        "--pace-tpot",
        type=RealRange(min=0),
        metavar="MS",
    )
    # A long answer takes minutes.
    drain_timeout_s: float = setting(
        300.0,
        "On SIGTERM, how long running streams may take to finish before they end with an error.",
        "--drain-timeout",
        type=Duration(min=0),
        metavar="SECONDS",
    )
    limits: Limits = Limits()
    api_keys: Path | None = setting(
        None,
        "Require users' API keys from this file, made by tailrace keys (--front rust: behind an edge).",
        type=click.Path(dir_okay=False, path_type=Path),
        envvar="TAILRACE_API_KEYS",
        metavar="FILE",
    )
    connections: ConnectionLimits = DEFAULT_CONNECTION_LIMITS
    body_limits: BodyLimits = DEFAULT_BODY_LIMITS
    keep_answers_s: float = setting(
        0.0,
        "How long an answer is kept for a client that reconnects (Last-Event-ID, Idempotency-Key); "
        "0: off (--front python only).",
        "--keep-answers",
        # Answers expire in steps of 0.5 s, and clients take a while to come back.
        type=Duration(min=5, max=1_000_000_000, or_zero=True),
        metavar="SECONDS",
    )
    # Enough for some thousands of long answers.
    keep_answers_bytes: int = setting(
        256 << 20,
        "Memory for all kept answers; one may use an eighth of it.",
        type=WholeRange(min=1 << 20),
        rare=True,
    )

    @property
    def pace_s(self) -> float | None:
        """Seconds per token at which answers are shown if the request does not set it; 0 shows tokens as they
        are generated, None leaves it to the policy that places the request."""
        return None if self.pace_tpot_ms is None else self.pace_tpot_ms / 1e3

    @property
    def reasons(self) -> bool:
        """Whether answers may begin with reasoning."""
        return bool(self.line.last("reasoning_parser"))

    @property
    def public_name(self) -> str:
        """The model name that users send."""
        return (self.line.flags.get("served_model_name") or (self.model,))[0]

    @property
    def names(self) -> frozenset[str]:
        """The other names that users may send: of the model, and of adapters in the line."""
        flags = self.line.flags
        named = (_adapter_name(text) for text in flags.get("lora_modules", ()))
        return frozenset({*flags.get("served_model_name", ()), *named} - {self.public_name, ""})


def _adapter_name(text: str) -> str:
    """Return the name in one value of --lora-modules, NAME=PATH or JSON; empty if vLLM will refuse it."""
    if not text.startswith("{"):
        return text.partition("=")[0]
    try:
        return msgspec.json.decode(text, type=_Adapter).name
    except msgspec.MsgspecError:
        return ""


def place_wait_s(front: Front) -> float:
    """Return how long a request waits for its first instance unless an operator says it."""
    return _RUST_PLACE_S if front is Front.RUST else WaitLimits().place_s
