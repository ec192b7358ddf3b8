"""The duration and load of each comparison, and its fleet."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self, TypeVar

from experiments.live.vllm.check import References
from tests.harness.vllm_fleet import BLOCK_TOKENS, Engines, Fleet, running_fleet

T = TypeVar("T")

# Little KV, order by policy: used by most comparisons.
SCARCE_KV: Final = Engines()


@dataclass(frozen=True, slots=True)
class Scale:
    """Seconds of arrivals per run, seeds, seconds of switching, and whether figures are saved."""

    seconds: float
    seeds: tuple[int, ...]
    switch_s: float
    keeps_results: bool
    # Relative to the fleet's rate with full KV.
    loads: tuple[float, ...] = (0.6, 0.8, 1.0, 1.2)

    @staticmethod
    def full(seeds: int) -> Scale:
        """Return the scale of docs/results.md."""
        return Scale(20.0, tuple(range(1, seeds + 1)), 120.0, True)

    @staticmethod
    def quick() -> Scale:
        """Return a small scale, to check that everything works; the figures are not reliable."""
        return Scale(6.0, (1,), 25.0, False, (1.0,))


@dataclass
class Bench:
    """Shared by the comparisons: one fleet at a time, and the undisturbed answers."""

    scale: Scale
    references: References = field(default_factory=References)

    def __post_init__(self) -> None:
        self._stack = contextlib.AsyncExitStack()
        self._engines = SCARCE_KV
        self._fleet: Fleet | None = None

    async def fleet(self, engines: Engines = SCARCE_KV) -> Fleet:
        """Return a fleet of such workers; keep the current one if it has them."""
        if self._fleet is None or self._engines != engines:
            await self.close()
            progress(f"starting a fleet, {' '.join(engines.arguments())}")
            self._fleet = await self._stack.enter_async_context(running_fleet(engines))
            self._engines = engines
        return self._fleet

    @property
    def kv_tokens(self) -> int:
        """KV tokens of each worker; vLLM reserves one block."""
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
    """Print a line about the progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def alternate_order(contestants: Sequence[T], number: int) -> Sequence[T]:
    """Return contestants in reverse order for every other seed, so that drift of the machine favours none."""
    return contestants if number % 2 == 0 else contestants[::-1]
