"""The cells of the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tailrace.tiny import MODEL_PATH
from tests.models.architectures import ARCHITECTURES, write_model
from tests.models.cell import RunConfig

TINY: Final = "tiny"
"""The trained model that is part of Tailrace."""

NAMES: Final = (TINY, *ARCHITECTURES)
# Tokens of an answer: with its prompt it fills one to five KV blocks on a CPU. Fewer if steps are slow.
_TOKENS: Final = 40
_TOKENS_V2: Final = 28


@dataclass(frozen=True, slots=True)
class Cell:
    """One architecture in one run configuration."""

    name: str
    v2: bool
    async_scheduling: bool
    # Tensor-parallel ranks and pipeline stages. If there are several of either, there are two engines.
    tensor: int = 1
    stages: int = 1

    @property
    def devices(self) -> str:
        """`TP 2`, `PP 2`, or empty for one device."""
        sizes = [f"{name} {size}" for name, size in (("TP", self.tensor), ("PP", self.stages)) if size > 1]
        return " ".join(sizes)

    def __str__(self) -> str:
        scheduling = "async" if self.async_scheduling else "sync"
        return ", ".join(filter(None, [self.name, f"V{2 if self.v2 else 1}", scheduling, self.devices]))


def cells_of(name: str) -> list[Cell]:
    """Return an architecture's cells: each runner and scheduling on one device; on two devices with V1, and
    with V2 as vLLM runs it on GPUs. The tiny model has all of them, and pipeline stages."""
    modes = [(v2, async_) for v2 in (False, True) for async_ in (False, True)]
    cells = [Cell(name, v2, async_) for v2, async_ in modes]
    cells += [Cell(name, v2, async_, tensor=2) for v2, async_ in modes if name == TINY or async_ or not v2]
    if name == TINY:
        cells += [Cell(name, v2, async_, stages=2) for v2, async_ in modes]
    return cells


def select_cells(names: Sequence[str]) -> list[Cell]:
    """Return the cells selected by names: of architectures, of cells, or prefixes of cells.

    Raise KeyError with the first name that matches none.
    """
    known = {str(cell): cell for name in NAMES for cell in cells_of(name)}
    found: dict[str, Cell] = {}
    for name in names:
        part = [name] if name in known else [each for each in known if each.startswith(f"{name},")]
        if not part:
            raise KeyError(name)
        found |= {each: known[each] for each in part}
    return list(found.values())


def model_folder(name: str, folder: Path) -> Path:
    """Return the model's folder; create the model if necessary."""
    return MODEL_PATH if name == TINY else write_model(name, folder)


def run_config(cell: Cell, folder: Path, streams: int) -> RunConfig:
    """Return the run configuration of a cell, with models in `folder`."""
    found = ARCHITECTURES.get(cell.name)
    return RunConfig(
        model=str(model_folder(cell.name, folder)),
        v2=cell.v2,
        async_scheduling=cell.async_scheduling,
        tensor=cell.tensor,
        stages=cell.stages,
        dtype=found.dtype if found else "float32",
        random_weights=found is not None,
        prefix_caching=found is None or found.prefix_caching,
        attention=found.attention if found else "",
        streams=streams,
        tokens=_TOKENS_V2 if cell.v2 else _TOKENS,
    )
