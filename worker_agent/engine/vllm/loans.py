"""Blocks of the prefix cache, on the device or in host memory, that another worker copies.

Engine thread, except for reading. vLLM names a block when the step that computes it is scheduled, so a loan
opens only after the steps that were in flight at its request have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.vllm.in_use import InUse
from worker_agent.engine.vllm.load import LoadedCore
from worker_agent.engine.vllm.pinned import Pinned

Opened = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Opening:
    """A loan that waits for `steps`, those that were in flight when it was requested."""

    steps: Sequence[object]
    blocks: int
    done: Opened


class Loans:
    """All loans of this engine, by ID."""

    def __init__(self, core: LoadedCore, post: Callable[[Callable[[], None]], None]) -> None:
        """`post` runs a command on the engine thread, from any thread."""
        self._core = core
        self._post = post
        self._loans: dict[str, Pinned] = {}
        self._opening: list[_Opening] = []

    def find(self, loan_id: str) -> Pinned | None:
        """Return the open loan, or None. Any thread."""
        return self._loans.get(loan_id)

    def open(self, loan_id: str, names: Sequence[bytes], done: Opened) -> None:
        """Pin the blocks with these names, up to the first missing one; call `done` with their number once
        they can be read. Raises EngineRefusal."""
        if loan_id in self._loans:
            raise EngineRefusal(f"{loan_id} is open")
        blocks = self._core.find_in_any_tier(names)
        self._core.pin(blocks)
        self._loans[loan_id] = Pinned(InUse(loan_id), blocks)
        self._opening.append(_Opening(self._steps(), len(blocks), done))
        self.on_step_end()

    def on_step_end(self) -> None:
        """Open the loans whose steps have ended."""
        if not self._opening:
            return
        opening, self._opening = self._opening, []
        in_flight = self._steps()
        for each in opening:
            if any(step is other for step in each.steps for other in in_flight):
                self._opening.append(each)
            else:
                each.done(each.blocks)

    def end(self, loan_id: str) -> None:
        """Free the blocks after the last read has ended; unknown loans are ignored."""
        loan = self._loans.pop(loan_id, None)
        if loan is None:
            return

        def free() -> None:
            self._core.unpin(loan.pinned)

        loan.reading.close(lambda: self._post(free))

    def _steps(self) -> list[object]:
        return [scheduled for _, scheduled, _ in self._core.core.batch_queue or ()]
