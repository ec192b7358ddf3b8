"""What both kinds of API server are told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

# An API server starts at once and waits for the first worker; how long is for us to say, not for vLLM.
READY_TIMEOUT_S: Final = 7 * 24 * 3600
DEFAULT_MAX_BODY_BYTES: Final = 64 << 20
"""Beyond it not even a worker would take what is inside."""


@dataclass(frozen=True, slots=True)
class ApiServerSpec:
    """The user's choices; `vllm_arguments` are `vllm serve` flags, passed on unread."""

    # HOST:PORT with the port that is really bound.
    http_address: str
    model: str
    served_model_name: str = ""
    reasoning_parser: str = ""
    # Seconds for responses under way once it is told to stop.
    drain_timeout_s: float = 0.0
    vllm_arguments: tuple[str, ...] = ()
    # File of tenants and keys (tailrace/tenancy); None: no key is asked for but vLLM's own.
    api_keys: Path | None = None
    # Largest body of a request.
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    # What is asked of the engine core says whose it is (tailrace/tenancy/share.py).
    tells_tenants: bool = False
    # Clients may come back for their answers (frontend_svc/answers).
    keeps_answers: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line, what to add to its environment, and the descriptors that it inherits."""

    command: tuple[str, ...]
    env: dict[str, str]
    fds: tuple[int, ...]


def offline_env(spec: ApiServerSpec) -> dict[str, str]:
    """A model in a local folder needs nothing from a hub; asking it anyway costs seconds at each start."""
    return {"HF_HUB_OFFLINE": "1"} if Path(spec.model).is_dir() else {}
