"""A request that needs an instance, as its front end announces it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Incoming:
    """Lengths in tokens."""

    request_id: str
    frontend_id: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    excluded: frozenset[str] = frozenset()
    # The key of the model it is for; empty: any.
    model: str = ""
    # Names of the blocks that it begins with, of so many tokens each, and its session, if known.
    block_names: tuple[int, ...] = ()
    block_tokens: int = 0
    session_id: str = ""
