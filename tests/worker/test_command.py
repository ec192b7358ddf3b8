"""The worker's command line."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
from click.testing import CliRunner

from tailrace.profiles import load_profile
from tailrace.service.vllm_line import VllmLine
from tailrace.store.store import Store
from tailrace.tiny import MODEL_PATH, PREDICTOR_PATH
from tests.waiting import WAIT_S
from tests.worker.worker_processes import worker_process
from worker_agent.engines import make_engine, with_tiny_models_defaults
from worker_agent.faults import VARIABLE, Faults
from worker_agent.main import command
from worker_agent.serving import consecutive_ids
from worker_agent.settings import EngineOptionError, EngineOptions, with_flags


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ("--max-model-len 32k --max_num_seqs=4", {"max_model_len": 32_000, "max_num_seqs": 4}),
        ("--block-size 8 --enable-prefix-caching", {"block_tokens": 8, "prefix_caching": True}),
        # Of a GPU, or of the API server.
        ("--gpu-memory-utilization 0.9 -tp 2 --tool-call-parser hermes", {}),
    ],
)
def test_a_simulated_engine_takes_a_vllm_line(flags: str, arguments: dict[str, object]) -> None:
    options = with_flags(EngineOptions("simulated"), VllmLine.read(["a/model", *flags.split()]))
    assert options.model == "a/model"
    assert options.arguments == arguments


def test_a_wrong_number_for_a_simulated_engine_is_named() -> None:
    with pytest.raises(EngineOptionError, match="--max-model-len: 'long' is not a number"):
        with_flags(EngineOptions("simulated"), VllmLine.read(["--max-model-len", "long"]))


async def test_a_profile_is_what_a_simulated_engine_is() -> None:
    profile = msgspec.structs.replace(load_profile("llama-3.1-8b-h100"), kv_capacity_tokens=160)
    engine = make_engine(EngineOptions("simulated"), profile=profile)
    info = await engine.start(Mock())
    await engine.stop()
    assert info.kv_blocks_total == 10


def test_unknown_setting_of_the_simulated_engine_is_named() -> None:
    with pytest.raises(EngineOptionError, match="wings"):
        make_engine(EngineOptions("simulated", arguments={"wings": 2}))
    with pytest.raises(EngineOptionError):
        make_engine(EngineOptions("simulated", arguments={"speed": "fast"}))
    with pytest.raises(EngineOptionError, match="no_such_profile"):
        make_engine(EngineOptions("simulated", arguments={"profile": "no_such_profile"}))
    with pytest.raises(EngineOptionError, match=r"speed 1e-09: prefill\.base_ms is "):
        make_engine(EngineOptions("simulated", arguments={"speed": 1e-9}))


def test_tiny_model_is_recognized_through_a_symlink(tmp_path: Path) -> None:
    link = tmp_path / "tiny-model"
    link.symlink_to(MODEL_PATH)
    for name in ("", str(MODEL_PATH), str(link)):
        options = with_tiny_models_defaults(EngineOptions("vllm", model=name))
        # In another precision its answers can be wrong.
        assert options.arguments == {"dtype": "float32", "reasoning_parser": "qwen3"}
        assert options.predictor == str(PREDICTOR_PATH)
    explicit = EngineOptions("vllm", predictor="", arguments={"dtype": "bfloat16"})
    assert with_tiny_models_defaults(explicit).arguments["dtype"] == "bfloat16"
    assert with_tiny_models_defaults(explicit).predictor == ""
    other = EngineOptions("vllm", model="some/model")
    assert with_tiny_models_defaults(other) == other


def test_several_workers_per_process_require_the_simulated_engine() -> None:
    result = CliRunner().invoke(command, ["--engine", "vllm", "--count", "2"])
    assert result.exit_code == 2 and "--count" in result.output


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        (["--sim", "profile=nowhere"], "no profile 'nowhere'"),
        (["--kv-address", "192.0.2.1", "--insecure"], "cannot be bound to 192.0.2.1"),
    ],
)
def test_a_wrong_option_is_told_without_etcd(option: list[str], problem: str) -> None:
    worker = [sys.executable, "-m", "tailrace", "serve", "worker", "--engine", "simulated"]
    ended = subprocess.run(
        [*worker, "--etcd", "127.0.0.1:1", *option], capture_output=True, text=True, timeout=WAIT_S
    )
    assert ended.returncode == 1 and problem in ended.stderr
    assert "etcd" not in ended.stderr


def test_invalid_faults_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, '{"hold": "import:open", "secnods": 3}')
    with pytest.raises(RuntimeError, match=VARIABLE):
        Faults.from_environment("w")


async def test_each_worker_of_a_process_is_registered(
    store: Store, etcd: str, cluster: str, tmp_path: Path
) -> None:
    async with worker_process(store, etcd, cluster, tmp_path, "many-3", count=5) as process:
        records = process.records
        assert [record.instance_id for record in records] == [f"many-{n}" for n in range(3, 8)]
        assert len({record.address for record in records}) == 5
        assert len({record.incarnation for record in records}) == 5
        maps = Path(f"/proc/{process.process.pid}/maps")
        assert "libtorch" not in await asyncio.to_thread(maps.read_text), (
            "a simulated worker has no use for it"
        )
    assert await store.get_prefix("instances/") == {}
    assert process.process.returncode == 0


@pytest.mark.parametrize(
    ("first", "ids"),
    [
        ("worker-5", ["worker-5", "worker-6"]),
        ("worker-9", ["worker-9", "worker-10"]),
        ("node-0444", ["node-0444", "node-0445"]),
        ("a-00", ["a-00", "a-01"]),
        ("worker", ["worker", "worker-1"]),
        ("a-", ["a-", "a--1"]),
        ("a-b7", ["a-b7", "a-b7-1"]),
    ],
)
def test_worker_ids_are_numbered_from_the_given_one(first: str, ids: list[str]) -> None:
    assert consecutive_ids(first, 2) == ids
    assert consecutive_ids(first, 1) == [first]
