"""Speculation and adapters on a real engine: migration, and missing adapters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

from tailrace.handover import TransferMode
from tailrace.json_value import JsonValue
from tailrace.model_identity import AdapterVersions
from tailrace.tiny import MODEL_PATH

pytest.importorskip("vllm", reason="the vLLM engine is not installed")

from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams

from tailrace.output_flags import OutputFlag
from tests.features.models import make_adapter
from tests.worker.vllm_bundle import take_out
from tests.worker.vllm_front import Front, Stream
from worker_agent.engine.errors import EngineRefusal, Unrunnable
from worker_agent.engine.vllm.engine import VllmEngine
from worker_agent.engine.vllm.internals import installed_version
from worker_agent.settings import EngineOptions

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

# Repetitions, in which n-gram speculation finds drafts.
PROMPT = [*b"abcd abcd abcd abcd. Count to 40 with abcd, then back to 3."]
NGRAM: dict[str, JsonValue] = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 2,
}
MODELS = ("", "one", "two")

# That version's rejection sampler requires Triton, which is not available on a CPU.
SPECULATES = not (current_platform.is_cpu() and installed_version().startswith("0.30."))


@dataclass
class Lab:
    """An engine with speculation, if its vLLM supports it, and adapters; and a front end."""

    engine: VllmEngine
    front: Front
    folder: Path
    mode: TransferMode

    def stream(self, model: str, number: int = 7, max_tokens: int = 50) -> Stream:
        """Create a greedy request for the tiny model or an adapter, with an API server's adapter number."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        adapter = (model, number, str(self.folder / model)) if model else None
        return self.front.stream(PROMPT, params, adapter=adapter)

    async def ends(self, *streams: Stream) -> None:
        for stream in streams:
            self.front.submit(self.engine, stream)
        await self.front.until(lambda: all(stream.finished for stream in streams))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(MODELS[1:]):
        make_adapter(folder / name, seed)
    engine = VllmEngine(
        EngineOptions(
            model=str(MODEL_PATH),
            kv_blocks=97,
            arguments={
                "dtype": "float32",
                "max_num_seqs": 8,
                "max_model_len": 1024,
                "enable_lora": True,
                "max_loras": 6,
                **({"speculative_config": NGRAM} if SPECULATES else {}),
            },
        )
    )
    front = Front()
    info = await engine.start(front)
    assert info.takes_adapters
    yield Lab(engine, front, folder, info.handover.mode)
    await engine.import_drop("nobody")
    stats = engine.stats()
    await engine.stop()
    assert (stats.kv_blocks_used, stats.requests, front.dead) == (0, [], "")


@pytest.mark.skipif(not SPECULATES, reason="vLLM 0.30 does not speculate on a CPU")
async def test_speculation_yields_several_tokens_per_step(lab: Lab) -> None:
    stream = lab.stream("")
    await lab.ends(stream)
    assert len(stream.tokens) == 50 > len(stream.flags)


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=pytest.mark.slow if name != "two" else []) for name in MODELS]
)
async def test_moved_request_yields_the_same_tokens(lab: Lab, model: str) -> None:
    assert lab.mode is TransferMode.LIVE
    reference, moved, replayed = (lab.stream(model) for _ in range(3))
    await lab.ends(reference)
    lab.front.submit(lab.engine, moved)
    for at in (5, 20):
        bundle = await take_out(lab.engine, lab.front, moved, at)
        await bundle.put_back(moved)
    await lab.front.until(lambda: moved.finished)
    assert moved.tokens == reference.tokens
    lab.front.submit(lab.engine, replayed)
    await lab.front.until_tokens(replayed, 15)
    await lab.engine.export_open(replayed.request_id)
    stopped = await lab.engine.export_stop(replayed.request_id)
    await lab.engine.export_release(replayed.request_id)
    replayed.epoch += 1
    lab.front.submit(lab.engine, replayed, stopped.sampling_state)
    await lab.front.until(lambda: replayed.finished)
    assert replayed.tokens == reference.tokens


@pytest.mark.slow
async def test_adapter_numbers_of_api_servers_are_independent(lab: Lab) -> None:
    """Two adapters with the same number, in one batch with the model itself."""
    alone = {}
    for model in MODELS:
        stream = lab.stream(model)
        await lab.ends(stream)
        alone[model] = stream.tokens
    assert len({tuple(tokens) for tokens in alone.values()}) == 3
    together = {model: lab.stream(model, 1) for model in MODELS}
    await lab.ends(*together.values())
    for model, stream in together.items():
        assert stream.tokens == alone[model]


async def test_missing_adapter_fails_only_its_request(lab: Lab) -> None:
    running, missing = lab.stream(""), lab.stream("nowhere")
    await lab.ends(running, missing)
    assert OutputFlag.FAILED in missing.all_flags
    # Another engine may have it.
    assert missing.refusal is not None and not isinstance(missing.refusal, Unrunnable)
    # vLLM's API server looks for its own words, and answers 404.
    words = str(LoRAAdapterNotFoundError("nowhere", str(lab.folder / "nowhere")))
    assert words in str(missing.refusal)
    assert len(running.tokens) == 50
    # A migration is refused before anything is copied.
    other = lab.stream("")
    lab.front.submit(lab.engine, other)
    await lab.front.until_tokens(other, 5)
    exported = await lab.engine.export_open(other.request_id)
    named = replace(exported, frames=missing.frames)
    with pytest.raises(EngineRefusal, match="adapter nowhere cannot be loaded from"):
        await lab.engine.replay_check(named, missing.key)
    await lab.engine.export_resume(other.request_id)
    await lab.front.until(lambda: other.finished)


@pytest.mark.slow
async def test_request_keeps_the_version_of_its_adapter(lab: Lab) -> None:
    """After the folder's weights change, new requests use them, and running ones keep the old weights.
    Requests that began elsewhere with the old weights are refused."""
    versions, folder = AdapterVersions(), lab.folder / "changing"
    make_adapter(folder, 5)
    first = versions.of(str(folder))
    running, alone = (lab.stream("changing", max_tokens=400) for _ in range(2))
    alone.adapter_version = running.adapter_version = first
    await lab.ends(alone)
    lab.front.submit(lab.engine, running)
    await lab.front.until_tokens(running, 5)
    exported = await lab.engine.export_open(running.request_id)
    assert exported.adapter_version == first
    make_adapter(folder, 6)
    second = versions.of(str(folder))
    changed, stale = lab.stream("changing", max_tokens=400), lab.stream("changing")
    changed.adapter_version, stale.adapter_version = second, first
    await lab.ends(changed, stale)
    assert OutputFlag.FAILED in stale.all_flags and not stale.tokens
    with pytest.raises(EngineRefusal, match=f"version {second} is in .*, and {first} was when"):
        await lab.engine.replay_check(exported, changed.key)
    await lab.engine.export_resume(running.request_id)
    await lab.front.until(lambda: running.finished)
    assert running.tokens == alone.tokens != changed.tokens


async def test_last_adapter_slot_stays_empty_on_a_cpu(lab: Lab) -> None:
    """There vLLM applies the last slot's adapter to requests without one that are batched with others."""
    failed = []
    for number in range(6):
        named = (f"another {number}", 9, str(lab.folder / "one"))
        stream = lab.front.stream(PROMPT, SamplingParams(max_tokens=2, temperature=0.0), adapter=named)
        await lab.ends(stream)
        failed.append(OutputFlag.FAILED in stream.all_flags)
    # One of six slots; other tests may have used four.
    assert (failed[0], failed[-1]) == (False, True)
