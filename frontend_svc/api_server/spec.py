"""The launch parameters of both kinds of API server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

# An API server starts at once and waits for the first worker; the front end decides for how long, not vLLM.
READY_TIMEOUT_S: Final = 7 * 24 * 3600
DEFAULT_MAX_BODY_BYTES: Final = 64 << 20
"""A larger request would exceed what a worker accepts anyway."""
ARGUMENTS_REFUSED: Final = 2
"""Exit status of an API server that has said on stderr which argument it refuses; click's, and vllm-rs's."""


@dataclass(frozen=True, slots=True)
class ApiServerSpec:
    """The user's choices; `vllm_arguments` are flags of `vllm serve`, passed on unparsed."""

    # HOST:PORT with the port that is actually bound.
    http_address: str
    model: str
    served_model_name: str = ""
    reasoning_parser: str = ""
    # Seconds for responses in progress to finish once it is told to stop.
    drain_timeout_s: float = 0.0
    vllm_arguments: tuple[str, ...] = ()
    # File of tenants and keys (tailrace/tenancy); None: no key is required but vLLM's own.
    api_keys: Path | None = None
    # Largest body of a request, in bytes.
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    # Whether requests carry their tenant to the engine core (tailrace/tenancy/share.py).
    sends_tenants: bool = False
    # Whether clients can come back for their answers (frontend_svc/answers).
    keeps_answers: bool = False


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
