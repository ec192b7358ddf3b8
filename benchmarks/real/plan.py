"""How long and how hard each comparison runs, and the fleet that it runs on."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self, TypeVar

from benchmarks.real.check import References
from benchmarks.real.fleet import BLOCK_TOKENS, Engines, Fleet, running_fleet

T = TypeVar("T")

# Little KV, orders by policy: what most comparisons run on.
PRESSED: Final = Engines()


@dataclass(frozen=True, slots=True)
class Scale:
    """Seconds of arrivals a run, seeds, seconds of switching, and whether figures are worth keeping."""

    seconds: float
    seeds: tuple[int, ...]
    switch_s: float
    lasting: bool
    # Of what the fleet makes with its KV full.
    loads: tuple[float, ...] = (0.6, 0.8, 1.0, 1.2)

    @staticmethod
    def full(seeds: int) -> Scale:
        """What docs/live-results.md shows."""
        return Scale(20.0, tuple(range(1, seeds + 1)), 120.0, True)

    @staticmethod
    def quick() -> Scale:
        """A taste: that it works, no figures to rely on."""
        return Scale(6.0, (1,), 25.0, False, (1.0,))


@dataclass
class Bench:
    """What the comparisons share: one fleet at a time, and the undisturbed answers."""

    scale: Scale
    references: References = field(default_factory=References)

    def __post_init__(self) -> None:
        self._stack = contextlib.AsyncExitStack()
        self._engines = PRESSED
        self._fleet: Fleet | None = None

    async def fleet(self, engines: Engines = PRESSED) -> Fleet:
        """A fleet of such workers; the present one, if it is."""
        if self._fleet is None or self._engines != engines:
            await self.close()
            progress(f"starting a fleet, {' '.join(engines.arguments())}")
            self._fleet = await self._stack.enter_async_context(running_fleet(engines))
            self._engines = engines
        return self._fleet

    @property
    def kv_tokens(self) -> int:
        """Of one of its workers; vLLM keeps one block for itself."""
        return (self._engines.kv_blocks - 1) * BLOCK_TOKENS

    async def close(self) -> None:
        """Stop the fleet."""
        self._fleet = None
        await self._stack.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def progress(text: str) -> None:
    """One line for who waits."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def mirrored(contestants: Sequence[T], number: int) -> Sequence[T]:
    """Every other seed the other way round, so that a machine that drifts favours nobody."""
    return contestants if number % 2 == 0 else contestants[::-1]
