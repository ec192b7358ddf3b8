"""What a worker's KV transport needs of an engine with several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from worker_agent.ranks.links import RankLinks


class RankedMemory(Protocol):
    """What the engine knows of its ranks' KV: the same block numbers in each. All calls on the event loop."""

    @property
    def links(self) -> RankLinks:
        """To its ranks."""

    def exported(self, request_id: str, first_block: int, num_blocks: int) -> Sequence[int]:
        """Where these pinned blocks of an export are. Raises EngineRefusal."""

    def receiving(
        self, request_id: str, first_block: int, num_blocks: int
    ) -> AbstractContextManager[Sequence[int]]:
        """While these blocks of an import are written: their places, fewer than asked for where the rest has
        none before the last token is known. Left without an error, they have come. Raises EngineRefusal."""
