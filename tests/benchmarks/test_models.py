"""Which cells `make test-models` is asked for."""

from __future__ import annotations

import pytest

from benchmarks.models.cells import Cell, cells_of, named


def test_an_architecture_is_all_of_its_cells_once() -> None:
    assert named(["llama"]) == cells_of("llama")
    assert named(["llama, V1, sync", "llama"]) == cells_of("llama")


def test_a_cell_is_that_cell_alone() -> None:
    assert named(["llama, V1, sync"]) == [Cell("llama", v2=False, async_scheduling=False)]
    assert named(["llama, V2, async, TP 2"]) == [Cell("llama", v2=True, async_scheduling=True, tensor=2)]


def test_how_names_begin_is_all_of_those() -> None:
    assert named(["llama, V1"]) == [cell for cell in cells_of("llama") if not cell.v2]


def test_what_names_no_cell_is_said() -> None:
    with pytest.raises(KeyError, match="llama, V3"):
        named(["llama", "llama, V3"])
