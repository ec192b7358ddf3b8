"""What both kinds of front half are told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

# A front half starts at once and waits for the first worker; how long is for us to say, not for vLLM.
READY_TIMEOUT_S: Final = 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class FrontHalfSpec:
    """The user's choices; `vllm_arguments` are `vllm serve` flags, passed on unread."""

    # HOST:PORT with the port that is really bound.
    http_address: str
    model: str
    served_model_name: str = ""
    reasoning_parser: str = ""
    # Seconds for responses under way once it is told to stop.
    drain_timeout_s: float = 0.0
    vllm_arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line, what to add to its environment, and the descriptors that it inherits."""

    command: tuple[str, ...]
    env: dict[str, str]
    fds: tuple[int, ...]


def offline_env(spec: FrontHalfSpec) -> dict[str, str]:
    """A model in a local folder needs nothing from a hub; asking it anyway costs seconds at each start."""
    return {"HF_HUB_OFFLINE": "1"} if Path(spec.model).is_dir() else {}
