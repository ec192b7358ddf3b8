"""The selection of cells in `make test-models`."""

from __future__ import annotations

import pytest

from tests.models.cells import Cell, cells_of, select_cells


def test_an_architecture_selects_all_of_its_cells_once() -> None:
    assert select_cells(["llama"]) == cells_of("llama")
    assert select_cells(["llama, V1, sync", "llama"]) == cells_of("llama")


def test_a_cell_selects_only_itself() -> None:
    assert select_cells(["llama, V1, sync"]) == [Cell("llama", v2=False, async_scheduling=False)]
    assert select_cells(["llama, V2, async, TP 2"]) == [
        Cell("llama", v2=True, async_scheduling=True, tensor=2)
    ]


def test_a_prefix_selects_all_matching_cells() -> None:
    assert select_cells(["llama, V1"]) == [cell for cell in cells_of("llama") if not cell.v2]


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(KeyError, match="llama, V3"):
        select_cells(["llama", "llama, V3"])
