"""Engines with two ranks: streams moved from rank to rank, and errors of impossible sizes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.handover import by_replay
from tailrace.json_value import JsonValue
from tailrace.tiny import MODEL_PATH
from tests.models.cell import MOVES
from tests.models.cells import Cell
from tests.models.lanes import run_cell

pytest.importorskip("vllm", reason="the vLLM engine is not installed")

from worker_agent.engine.vllm.connector import handover_of
from worker_agent.engine.vllm.ranks import encode_options, folder_key, node_options
from worker_agent.engine.vllm.settings import vllm_config
from worker_agent.parallel.rank_leftovers import WORKER_PID
from worker_agent.settings import EngineOptions

pytestmark = pytest.mark.vllm

STREAMS = 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        Cell("tiny", v2=False, async_scheduling=False, tensor=2),
        Cell("tiny", v2=False, async_scheduling=True, tensor=2),
        Cell("tiny", v2=False, async_scheduling=False, stages=2),
    ],
    ids=str,
)
async def test_streams_moved_between_ranks_are_unchanged(cell: Cell, tmp_path: Path) -> None:
    result = await run_cell(cell, tmp_path, STREAMS)
    assert result.error == ""
    assert (result.equal, result.live) == (STREAMS, MOVES * STREAMS)


TWO_NODES: dict[str, JsonValue] = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": 29_600}


@pytest.fixture
def ranks_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore what an engine with several ranks sets."""
    for name in ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS", WORKER_PID):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("ranks_environment")
def test_requests_of_an_engine_on_two_nodes_move_by_replay() -> None:
    settings = EngineOptions(model=str(MODEL_PATH), arguments={**TWO_NODES, "tensor_parallel_size": 2})
    assert handover_of(vllm_config(settings)) == by_replay("ranks on 2 nodes")


def test_nodes_get_the_settings_of_their_worker() -> None:
    settings = EngineOptions(model="there", kv_blocks=9, arguments={**TWO_NODES, "tensor_parallel_size": 2})
    encoded = encode_options(settings)
    node = replace(settings, arguments={**settings.arguments, "node_rank": 1}, unused=[])
    assert node_options(encoded, 1, None) == node
    assert node_options(encoded, 1, "here") == replace(node, model="here")


def test_models_are_compared_by_their_files(tmp_path: Path) -> None:
    copy = shutil.copytree(MODEL_PATH, tmp_path / "copy")
    assert folder_key(str(copy)) == folder_key(str(MODEL_PATH)) != ""
    (copy / "config.json").write_text("{}")
    assert folder_key(str(copy)) != folder_key(str(MODEL_PATH))
    assert folder_key("a-name/on-a-hub") == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tensor_parallel_size": 3}, "must be divisible by tensor parallel size"),
        (
            {"data_parallel_size": 2},
            "data_parallel_size 2: .*data_parallel_rank says which",
        ),
        ({"data_parallel_size": "2"}, "data_parallel_size '2': must be a number of ranks"),
        (
            {"data_parallel_rank": 1},
            "data_parallel_rank 1: data_parallel_size says of how many",
        ),
        (
            {"data_parallel_size": 2, "data_parallel_rank": 2},
            "data_parallel_rank 2: with data_parallel_size 2, ranks are 0 to 1",
        ),
        (
            {"data_parallel_size": 4, "data_parallel_size_local": 2},
            "data_parallel_size_local 2: each worker is one data-parallel rank",
        ),
        (
            {"data_parallel_size": 2, "data_parallel_rank": 1, "nnodes": 2},
            "nnodes 2: data-parallel ranks that span machines are not supported",
        ),
        (
            {"data_parallel_size": 2, "data_parallel_rank": 1},
            "Non-MoE models do not support external data parallel mode",
        ),
        ({"nnodes": 2}, "nnodes 2: does not divide tensor_parallel_size 1 x pipeline_"),
        (
            {**TWO_NODES, "tensor_parallel_size": 4},
            "on 2 nodes needs exactly 2 devices on each; this process sees 1",
        ),
        (
            {"distributed_executor_backend": "ray"},
            "distributed_executor_backend ray: cannot be set, the worker starts its ranks with vLLM's `mp` ",
        ),
        ({"worker_extension_cls": "a.B"}, "worker_extension_cls a.B: cannot be set"),
        ({"tensor_parallel_size": "two"}, "tensor_parallel_size 'two': a number of devices"),
        ({"dtype": "foo"}, "dtype 'foo': Input should be 'auto', 'half', "),
        ({"max_model_len": 1_000_000}, r"max_model_len \(1000000\) is greater than "),
        ({"max_model_length": 512}, "no engine argument max_model_length"),
    ],
)
@pytest.mark.usefixtures("ranks_environment")
def test_impossible_settings_are_reported_in_one_line(arguments: dict[str, JsonValue], said: str) -> None:
    with pytest.raises(RuntimeError, match=said) as error:
        vllm_config(EngineOptions(model=str(MODEL_PATH), arguments=arguments))
    assert "\n" not in str(error.value)
