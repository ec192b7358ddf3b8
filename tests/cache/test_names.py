"""Block names computed outside vLLM equal vLLM's."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

from tailrace.cache.names import Keys, Naming, block_names, short
from tailrace.wire.cache_keys import read_cache_keys

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackEncoder

TEXT = EngineCoreRequest(
    request_id="r",
    prompt_token_ids=[7 * n % 301 for n in range(150)],
    mm_features=None,
    sampling_params=SamplingParams(max_tokens=4),
    pooling_params=None,
    arrival_time=1.0,
    lora_request=None,
    cache_salt=None,
    data_parallel_rank=None,
)


def image(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    where = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=where)


VARIANTS: dict[str, dict[str, Any]] = {
    "text": {},
    "salt": {"cache_salt": "tenant-1"},
    "adapter": {"lora_request": LoRARequest("sql", 3, "/adapters/sql")},
    "images": {"mm_features": [image("a1", 5, 40), image("b2", 45, 10), image("a1", 96, 20)]},
    "all": {
        "cache_salt": "s",
        "lora_request": LoRARequest("sql", 3, "/adapters/sql"),
        "mm_features": [image("a1", 20, 64)],
    },
    "session": {"session_id": "c-1"},
    "exactly full": {"prompt_token_ids": list(range(64))},
    "short": {"prompt_token_ids": [1, 2, 3]},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [16, 32])
def test_block_names_equal_those_of_vllm(variant: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PYTHONHASHSEED", "0")
    kv_cache_utils.init_none_hash(sha256)
    message = msgspec.structs.replace(TEXT, **VARIANTS[variant])
    frames = [bytes(frame) for frame in MsgpackEncoder().encode(message)]
    request = Request.from_engine_core_request(message, kv_cache_utils.get_request_block_hasher(size, sha256))
    read = read_cache_keys(frames)
    assert read is not None
    tokens = read.tokens()
    names = block_names(tokens, Naming(algorithm="sha256", seed="0", block_tokens=size), read.keys)
    full = (len(tokens) - 1) // size
    assert read.session_id == (message.session_id or "")
    assert names == [short(block_hash) for block_hash in request.block_hashes[:full]]


def test_block_names_depend_on_algorithm_and_salt() -> None:
    tokens = list(range(100))
    naming = Naming(algorithm="sha256", seed="0", block_tokens=16)
    assert len(block_names(tokens, naming)) == 6
    assert len(block_names(tokens, naming, limit=4)) == 4
    assert block_names(tokens, naming)[:4] == block_names(tokens, naming, limit=4)
    assert block_names(tokens, Naming(algorithm="xxhash", seed="0", block_tokens=16)) == []
    assert block_names(tokens, naming, Keys(salt="a")) != block_names(tokens, naming, Keys(salt="b"))
    assert read_cache_keys([b"\x93\x01\x02\x03"]) is None
