"""What the KV transport of an engine with several ranks needs from the engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from worker_agent.ranks.links import RankLinks


class RankedMemory(Protocol):
    """The engine's view of its ranks' KV: block numbers are the same in each. Call on the event loop only."""

    @property
    def links(self) -> RankLinks:
        """Return the connections to the ranks."""

    def exported(self, request_id: str, first_block: int, num_blocks: int) -> Sequence[int]:
        """Return the places of these pinned blocks of an export. Raises EngineRefusal."""

    def receiving(
        self, request_id: str, first_block: int, num_blocks: int
    ) -> AbstractContextManager[Sequence[int]]:
        """Reserve the places of these blocks of an import while they are written.

        Yields fewer places than blocks where the rest has none before the last token is known. Leaving
        without an error marks the blocks as received. Raises EngineRefusal.
        """
