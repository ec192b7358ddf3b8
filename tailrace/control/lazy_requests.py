"""A sequence of requests whose views are made, and which is counted, only on access."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import overload

from tailrace.cluster import PhaseLoad, RequestView
from tailrace.policy.phase_load import CountsPhases, ListsPrompts


class LazyRequests(CountsPhases, ListsPrompts, Sequence[RequestView]):
    """Make the views of an instance's requests once, and keep the last count of all of them.

    The live scheduler and the simulator differ in what they make and count them from.
    """

    __slots__ = ("_built", "_counted")

    def __init__(self) -> None:
        self._built: tuple[RequestView, ...] | None = None
        self._counted: PhaseLoad | None = None

    @abstractmethod
    def _build(self) -> tuple[RequestView, ...]:
        """Make the views."""

    @abstractmethod
    def _count(self, quantum_tokens: int, without: str) -> PhaseLoad:
        """Count as the function `phase_load` does, without making the views."""

    def phase_load(self, quantum_tokens: int, without: str) -> PhaseLoad:
        """Return the counts, without making the views. Those of all requests are cached."""
        if without:
            return self._count(quantum_tokens, without)
        counted = self._counted
        if counted is None or counted.quantum_tokens != quantum_tokens:
            counted = self._counted = self._count(quantum_tokens, "")
        return counted

    def _all(self) -> tuple[RequestView, ...]:
        if self._built is None:
            self._built = self._build()
        return self._built

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Iterator[RequestView]:
        return iter(self._all())

    @overload
    def __getitem__(self, index: int) -> RequestView: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RequestView]: ...
    def __getitem__(self, index: int | slice) -> RequestView | Sequence[RequestView]:
        return self._all()[index]
