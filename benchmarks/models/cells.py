"""The cells of the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.models.architectures import ARCHITECTURES, write_model
from benchmarks.models.cell import Way
from tailrace.tiny import MODEL_PATH

TINY: Final = "tiny"
"""The trained model that Tailrace carries."""

NAMES: Final = (TINY, *ARCHITECTURES)
# Of an answer: with its prompt one to five blocks of a KV cache on a CPU. Fewer where steps are slow.
_TOKENS: Final = 40
_TOKENS_V2: Final = 28


@dataclass(frozen=True, slots=True)
class Cell:
    """One architecture in one way to run."""

    name: str
    v2: bool
    async_scheduling: bool
    # Ranks that share each layer, and stages of layers. With several of either there are two such engines.
    tensor: int = 1
    stages: int = 1

    @property
    def devices(self) -> str:
        """TP 2, PP 2, or nothing for one device."""
        sizes = [f"{name} {size}" for name, size in (("TP", self.tensor), ("PP", self.stages)) if size > 1]
        return " ".join(sizes)

    def __str__(self) -> str:
        way = "async" if self.async_scheduling else "sync"
        return ", ".join(filter(None, [self.name, f"V{2 if self.v2 else 1}", way, self.devices]))


def cells_of(name: str) -> list[Cell]:
    """An architecture's ways to run: each runner and scheduling on one device; two devices with V1, and with
    V2 as vLLM has it on GPUs. The tiny model has all of them, and stages too."""
    ways = [(v2, async_) for v2 in (False, True) for async_ in (False, True)]
    cells = [Cell(name, v2, async_) for v2, async_ in ways]
    cells += [Cell(name, v2, async_, tensor=2) for v2, async_ in ways if name == TINY or async_ or not v2]
    if name == TINY:
        cells += [Cell(name, v2, async_, stages=2) for v2, async_ in ways]
    return cells


def named(names: Sequence[str]) -> list[Cell]:
    """The cells of these names: of architectures, of cells, or how those of several cells begin.

    Raises KeyError with the first that names none.
    """
    known = {str(cell): cell for name in NAMES for cell in cells_of(name)}
    found: dict[str, Cell] = {}
    for name in names:
        part = [name] if name in known else [each for each in known if each.startswith(f"{name},")]
        if not part:
            raise KeyError(name)
        found |= {each: known[each] for each in part}
    return list(found.values())


def folder_of(name: str, folder: Path) -> Path:
    """The model's folder, written if need be."""
    return MODEL_PATH if name == TINY else write_model(name, folder)


def way_of(cell: Cell, folder: Path, streams: int) -> Way:
    """What a process is to do for it, with models in `folder`."""
    found = ARCHITECTURES.get(cell.name)
    return Way(
        model=str(folder_of(cell.name, folder)),
        v2=cell.v2,
        async_scheduling=cell.async_scheduling,
        tensor=cell.tensor,
        stages=cell.stages,
        dtype=found.dtype if found else "float32",
        random_weights=found is not None,
        prefix_caching=found is None or found.prefix_caching,
        streams=streams,
        tokens=_TOKENS_V2 if cell.v2 else _TOKENS,
    )
