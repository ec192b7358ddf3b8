"""A single other KV connector: it stays in use, and requests move by replay with a stated reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.handover import TransferMode
from tailrace.json_value import JsonValue
from tailrace.tiny import MODEL_PATH

pytest.importorskip("vllm", reason="the vLLM engine is not installed")

from tests.worker.test_vllm_other_connectors import BESIDE, OFFLOADING, PROMPT, greedy
from tests.worker.vllm_front import Front
from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.vllm.connector import handover_of, transfer_config
from worker_agent.engine.vllm.engine import VllmEngine
from worker_agent.engine.vllm.settings import vllm_config
from worker_agent.settings import EngineOptions

pytestmark = pytest.mark.vllm


def names(arguments: dict[str, object]) -> list[str]:
    config = transfer_config(arguments)
    assert not arguments
    children = config.kv_connector_extra_config.get("connectors", [])
    return [config.kv_connector, *(child["kv_connector"] for child in children)]


def stored(folder: Path) -> list[Path]:
    return list(folder.rglob("*.safetensors"))


def test_our_connector_is_added_to_the_given_ones() -> None:
    assert names({}) == ["TailraceConnector"]
    both = ["MultiConnector", "OffloadingConnector", "TailraceConnector"]
    assert names({"kv_transfer_config": BESIDE}) == both
    assert names({"kv_transfer_config": OFFLOADING}) == both
    assert names({"kv_offloading_size": 2.0}) == both
    assert names({"kv_offloading_size": 2.0, "kv_offloading_backend": "lmcache"})[1] == "LMCacheMPConnector"
    # A configuration that already contains it is unchanged.
    mine: dict[str, JsonValue] = {"kv_connector": "TailraceConnector", "kv_role": "kv_both"}
    whole: dict[str, JsonValue] = {**BESIDE, "kv_connector_extra_config": {"connectors": [mine, OFFLOADING]}}
    assert names({"kv_transfer_config": whole}) == ["MultiConnector", "TailraceConnector", both[1]]


@pytest.mark.parametrize(
    ("arguments", "mode", "reason"),
    [
        ({"kv_transfer_config": BESIDE}, TransferMode.LIVE, ""),
        ({"kv_offloading_size": 1.0}, TransferMode.LIVE, ""),
        ({"kv_transfer_config": OFFLOADING}, TransferMode.REPLAY, "kv_connector OffloadingConnector alone"),
        (
            {"kv_transfer_config": BESIDE, "tensor_parallel_size": 2},
            TransferMode.REPLAY,
            "other KV connectors on an engine with several ranks",
        ),
    ],
)
def test_how_requests_move(
    arguments: dict[str, JsonValue], mode: TransferMode, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):
        # Set as the engine does, and restored afterwards.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    handover = handover_of(vllm_config(EngineOptions(model=str(MODEL_PATH), arguments=arguments)))
    assert handover.mode is mode
    assert handover.reason.startswith(reason)


def test_invalid_configuration_is_reported_in_one_line() -> None:
    with pytest.raises(RuntimeError, match="kv_transfer_config 'x': a JSON object expected"):
        vllm_config(EngineOptions(model=str(MODEL_PATH), arguments={"kv_transfer_config": "x"}))


async def test_stream_is_replayed_with_a_disk_store(tmp_path: Path) -> None:
    engine = VllmEngine(
        EngineOptions(
            model=str(MODEL_PATH),
            kv_blocks=32,
            arguments={
                "dtype": "float32",
                "max_model_len": 512,
                # Otherwise the device would still have the blocks on disk.
                "enable_prefix_caching": False,
                "kv_transfer_config": {
                    "kv_connector": "ExampleConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
                },
            },
        )
    )
    front = Front()
    info = await engine.start(front)
    try:
        assert info.handover.mode is TransferMode.REPLAY
        assert info.handover.reason.startswith("kv_connector ExampleConnector alone")
        reference = await front.run(engine, PROMPT, greedy())
        assert stored(tmp_path)
        moved = front.stream(PROMPT, greedy())
        front.submit(engine, moved)
        await front.until_tokens(moved, 15)
        exported = await engine.export_open(moved.request_id)
        assert exported.replay_reason == info.handover.reason and not exported.block_hashes
        stopped = await engine.export_stop(moved.request_id)
        await engine.export_release(moved.request_id)
        moved.epoch += 1
        front.submit(engine, moved, stopped.sampling_state)
        await front.until(lambda: moved.finished)
        assert moved.tokens == reference.tokens
        with pytest.raises(EngineRefusal):
            await engine.export_open(moved.request_id)
    finally:
        await engine.stop()
