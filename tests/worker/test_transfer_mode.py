"""How a request moves between two engines, live or by replay, depending on their properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.handover import LIVE, Handover, TransferMode, by_replay, handover_between
from tailrace.model_identity import ModelIdentity
from tailrace.v1 import worker_pb2
from worker_agent.engine.base import EngineInfo, KvShape
from worker_agent.kv.address import kv_layout
from worker_agent.migration.copying import Abort, handover_to, identity_message

SHAPE = KvShape("fingerprint", block_tokens=16, num_layers=2, layer_block_bytes=512)
MODEL = ModelIdentity("text", "weights", "bfloat16 None auto")
INFO = EngineInfo("vllm", "tiny", MODEL, SHAPE, 100, 2048, 8, b"")
STAYS = Handover(TransferMode.STAYS, "a pooling model")


def opened(shape: KvShape = SHAPE, model: ModelIdentity = MODEL, reason: str = "") -> worker_pb2.ExportOpened:
    """Return the source's handover, decoded from its message."""
    message = worker_pb2.ExportOpened(
        layout=kv_layout(shape), model=identity_message(model), replay_reason=reason
    )
    return worker_pb2.ExportOpened.FromString(message.SerializeToString())


def test_requests_between_equal_engines_move_live() -> None:
    assert handover_to(INFO, opened()) == LIVE


@pytest.mark.parametrize(
    ("info", "source", "reason"),
    [
        (INFO, opened(reason="a draft model"), "source: a draft model"),
        (replace(INFO, handover=by_replay("version 9")), opened(), "target: version 9"),
        (INFO, opened(replace(SHAPE, block_tokens=32)), "KV blocks of 32 tokens against 16 (block_size)"),
        (INFO, opened(replace(SHAPE, model_fingerprint="other")), "kv_cache_dtype"),
        (
            INFO,
            opened(replace(SHAPE, layer_block_bytes=256)),
            "2 layers of 256 bytes a block against 2 of 512",
        ),
        (INFO, opened(replace(SHAPE, tensor_parallel_size=2)), "tensor_parallel_size 2 against 1"),
        (INFO, opened(replace(SHAPE, pipeline_parallel_size=4)), "pipeline_parallel_size 4 against 1"),
    ],
)
def test_incompatible_kv_is_replayed_and_the_setting_is_named(
    info: EngineInfo, source: worker_pb2.ExportOpened, reason: str
) -> None:
    handover = handover_to(info, source)
    assert handover.mode is TransferMode.REPLAY
    assert reason in handover.reason


@pytest.mark.parametrize(
    ("model", "setting"),
    [
        # Of a message that lacks it.
        (ModelIdentity(""), "--model"),
        (ModelIdentity("other", "weights", MODEL.precision), "--model"),
        (ModelIdentity("text", "other", MODEL.precision), "--revision"),
        (ModelIdentity("text", "weights", "float32 None auto"), "dtype"),
    ],
)
def test_answer_of_another_model_is_never_continued(model: ModelIdentity, setting: str) -> None:
    with pytest.raises(Abort, match=setting):
        handover_to(INFO, opened(replace(SHAPE, model_fingerprint="other"), model))


def test_pooling_model_takes_no_request() -> None:
    with pytest.raises(Abort, match="target: a pooling model"):
        handover_to(replace(INFO, handover=STAYS), opened())


ENDS = st.sampled_from([LIVE, by_replay("a feature"), STAYS])


@given(source=ENDS, target=ENDS)
def test_less_capable_end_decides(source: Handover, target: Handover) -> None:
    order = [TransferMode.LIVE, TransferMode.REPLAY, TransferMode.STAYS]
    handover = handover_between(source, target)
    assert handover.mode is max(source.mode, target.mode, key=order.index)
    assert bool(handover.reason) == (handover.mode is not TransferMode.LIVE)
