"""The vLLM engine on the tiny model: requests yield the same outputs, whatever happens to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import pytest_asyncio

from experiments.tiny.tokens import encode_turns
from tailrace.cache.follow import Change
from tailrace.cache.index import Tier
from tailrace.cache.names import block_names, short
from tailrace.cluster import Phase
from tailrace.handover import LIVE, TransferMode
from tailrace.tiny import MODEL_PATH, PREDICTOR_PATH, REASONING_PARSER
from tailrace.tiny.task import task
from tests.waiting import WAIT_S

pytest.importorskip("vllm", reason="the vLLM engine is not installed")

from safetensors import safe_open
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tailrace.output_flags import OutputFlag
from tests.worker.vllm_bundle import Bundle, forget_prefixes, take_out
from tests.worker.vllm_front import Front, Stream
from worker_agent.engine.base import (
    EngineInfo,
    ExportedPause,
    Held,
    RequestKey,
    Submission,
)
from worker_agent.engine.errors import EngineRefusal, KvCorrupt, NoRoom, Unrunnable
from worker_agent.engine.vllm import connector
from worker_agent.engine.vllm.connector import handover_of
from worker_agent.engine.vllm.core import EngineParts
from worker_agent.engine.vllm.engine import VllmEngine
from worker_agent.engine.vllm.hidden_states import StepStates
from worker_agent.engine.vllm.kv_blocks import DeviceStaging
from worker_agent.engine.vllm.requests import LengthPrediction
from worker_agent.settings import EngineOptions

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

BLOCK = 32
KV_BLOCKS = 97
THINK_END = 260
EOS = 258
# Byte-level: a byte's token ID is the byte.
QUESTION = [*b"Count to 9 with abcd, then back to 3. What comes first, and what comes last?"]
REASONING = [*QUESTION, 259]
ANSWERING = [*QUESTION, 259, THINK_END]
ENGINE_ARGUMENTS = {
    "model": str(MODEL_PATH),
    "dtype": "float32",
    "max_num_seqs": 16,
    "max_model_len": 2048,
    "block_size": BLOCK,
}


@pytest.fixture(scope="module", autouse=True)
def plain_vllm() -> Iterator[subprocess.Popen[str]]:
    """Plain `LLM` in a separate process. Its slow start overlaps with the tests here."""
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("vllm_reference.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        job = {
            "engine": ENGINE_ARGUMENTS | {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 27},
            "requests": PLAIN_REQUESTS,
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(job))
        process.stdin.close()
        process.stdin = None
        try:
            yield process
        finally:
            process.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started() -> AsyncIterator[tuple[VllmEngine, Front, EngineInfo]]:
    """One engine for the whole module, as vLLM allows one per process."""
    engine = VllmEngine(
        EngineOptions(
            model=str(MODEL_PATH),
            kv_blocks=KV_BLOCKS,
            predictor=str(PREDICTOR_PATH),
            arguments={
                "dtype": "float32",
                "max_num_seqs": 16,
                "max_model_len": 2048,
                "reasoning_parser": REASONING_PARSER,
                "max_num_batched_tokens": 256,
            },
        )
    )
    front = Front()
    info = await engine.start(front)
    yield engine, front, info
    await engine.stop()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def nothing_left(engine: VllmEngine, front: Front) -> AsyncIterator[None]:
    """Check that every test ends with no request and no block in use."""
    yield
    await idle(engine)
    stats = engine.stats()
    # Keep a failure of one test from failing all later ones.
    engine.abort_client(0)
    for stream in front.streams.values() if stats.kv_blocks_used else ():
        with contextlib.suppress(EngineRefusal):
            await engine.export_release(stream.request_id)
    assert (stats.kv_blocks_used, stats.requests) == (0, [])
    names = {name for stream in front.streams.values() for name in (stream.request_id, stream.key)}
    assert await engine._run(lambda parts: names_kept(parts, names)) == []
    assert not front.dead


def names_kept(parts: EngineParts, names: Collection[object]) -> list[str]:
    """Return which attributes of the engine's objects, and of vLLM's, have one of these requests."""
    core, manager = parts.core, parts.core.kv_manager
    (runner,) = core.core.collective_rpc(lambda worker: worker.model_runner)
    ours = [parts.table, parts.exports, parts.imports, parts.imports._queue, parts.loans, parts.fetches]
    ours += [core.host, core.scheduler.tailrace_connector]
    theirs = [core.scheduler, manager, *manager.coordinator.single_type_managers, runner, runner.input_batch]
    return [
        f"{type(owner).__name__}.{name}"
        for owner in (*ours, *theirs)
        for name, value in vars(owner).items()
        if isinstance(value, dict | set) and any(each in names for each in value)
    ]


async def idle(engine: VllmEngine) -> None:
    """Wait until the engine thread has run all commands so far and finished steps of ended requests."""
    await engine.import_drop("nobody")
    await engine.import_drop("nobody")
    while await engine._run(lambda parts: parts.core.busy and not parts.core.scheduler.requests):
        pass


def params(**changes: object) -> SamplingParams:
    """Return parameters of a request that runs long enough to be disturbed."""
    values: dict[str, object] = {"max_tokens": 110, "ignore_eos": True, "temperature": 0.0}
    return SamplingParams(**(values | changes))


# Attempts with requests that may end before they are moved.
TRIES = 5
NO_THINK_END = {THINK_END: -100.0}
SEEDED = {
    "temperature": 1.0,
    "seed": 11,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.3,
    "repetition_penalty": 1.1,
    "logprobs": 4,
    "top_p": 0.97,
}
PLAIN_REQUESTS: list[tuple[list[int], dict[str, object]]] = [
    (ANSWERING, {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}),
    (REASONING, {"temperature": 1.0, "seed": 42, "max_tokens": 60, "ignore_eos": True}),
    (ANSWERING, {"max_tokens": 60, "ignore_eos": True, **SEEDED}),
]
SCHEMA = {"type": "array", "items": {"enum": ["ab", "cd", "efgh"]}, "minItems": 20, "maxItems": 20}


def schema() -> StructuredOutputsParams:
    """Return a schema with the backend that vLLM's API server chooses for it."""
    outputs = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    outputs._backend = "xgrammar"
    return outputs


CASES = {
    "greedy, reasoning": (REASONING, params(logit_bias=NO_THINK_END)),
    "greedy, answering": (ANSWERING, params()),
    "seeded, reasoning": (REASONING, params(logit_bias=NO_THINK_END, **SEEDED)),
    "seeded, answering": (ANSWERING, params(**SEEDED)),
    "reasoning ends by itself": (QUESTION, params(temperature=1.0, seed=5)),
    "min tokens": (ANSWERING, params(temperature=1.0, seed=3, ignore_eos=False, min_tokens=80)),
    "stop token": (
        ANSWERING,
        params(temperature=1.0, seed=4, stop_token_ids=[*range(0, 250, 97)], min_tokens=70),
    ),
    "allowed tokens": (
        ANSWERING,
        params(temperature=0.8, seed=6, top_k=20, min_p=0.01, allowed_token_ids=[*range(32, 100)]),
    ),
    "thinking budget": (REASONING, params(temperature=1.0, seed=13, thinking_token_budget=55)),
    "json schema": (
        ANSWERING,
        params(temperature=1.0, seed=8, ignore_eos=False, structured_outputs=schema()),
    ),
    "json schema after reasoning": (
        QUESTION,
        params(
            temperature=1.0, seed=9, max_tokens=200, logit_bias={THINK_END: 6.0}, structured_outputs=schema()
        ),
    ),
}


# The others run with async scheduling, vLLM's default (test_vllm_async.py), and `make soak` runs the rest.
SAMPLE = {"greedy, reasoning", "seeded, answering", "thinking budget", "json schema after reasoning"}


@pytest.fixture(
    params=[pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.slow) for name in CASES],
    ids=lambda name: name.replace(" ", "-"),
)
def case(request: pytest.FixtureRequest) -> tuple[list[int], SamplingParams]:
    return case_of(request.param)


def case_of(name: str) -> tuple[list[int], SamplingParams]:
    prompt, sampling = CASES[name]
    sampling = sampling.clone()
    # As vLLM's API server does for every request.
    sampling.update_from_generation_config({}, EOS)
    return prompt, sampling


def assert_same(stream: Stream, reference: Stream, tolerance: float = 1e-4) -> None:
    """Check that tokens, finish reason and log-probabilities equal those of the undisturbed run."""
    assert stream.tokens == reference.tokens
    assert stream.finish_reason == reference.finish_reason
    assert len(stream.logprobs) == len(reference.logprobs)
    for one, other in zip(stream.logprobs, reference.logprobs, strict=True):
        assert one == pytest.approx(other, abs=tolerance)


# ---- plain


async def test_start_returns_the_engine_info(started: tuple[VllmEngine, Front, EngineInfo]) -> None:
    info = started[2]
    assert info.kv_blocks_total == KV_BLOCKS - 1
    assert (info.max_model_len, info.max_num_seqs, info.kv_shape.block_tokens) == (2048, 16, BLOCK)
    config = json.loads((Path(MODEL_PATH) / "config.json").read_text())
    values = 2 * config["num_key_value_heads"] * config["head_dim"] * BLOCK
    assert info.kv_shape.num_layers == config["num_hidden_layers"]
    assert info.kv_shape.layer_block_bytes == values * 4


@pytest.mark.parametrize("version", ["0.29.1", "0.33.0", "1.0.0rc1"])
async def test_untested_version_moves_by_replay_and_reports_this(
    engine: VllmEngine,
    version: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = engine._parts.core.config
    assert handover_of(config) == LIVE
    monkeypatch.setattr(connector, "vllm_version", version)
    assert handover_of(config).mode is TransferMode.REPLAY
    assert handover_of(config).reason.startswith(f"vLLM {version}: ")
    assert any(record.levelname == "WARNING" and version in record.message for record in caplog.records)


@pytest.mark.parametrize(("method", "mode"), [("ngram", TransferMode.LIVE), ("eagle3", TransferMode.REPLAY)])
async def test_stateful_drafts_move_by_replay(
    engine: VllmEngine, method: str, mode: TransferMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine._parts.core.config
    monkeypatch.setattr(config, "speculative_config", SimpleNamespace(method=method))
    assert handover_of(config).mode is mode
    assert (method in handover_of(config).reason) == (mode is TransferMode.REPLAY)


async def test_seeded_prompt_longer_than_a_step_does_not_end_the_engine(
    engine: VllmEngine, front: Front
) -> None:
    """vLLM reverts the draws of unfinished prompts, which plain CPU generators do not support."""
    sampling = params(temperature=1.0, seed=1, max_tokens=40)
    long = [*QUESTION] * 12
    first = await front.run(engine, long, sampling)
    second = await front.run(engine, long, sampling)
    assert first.tokens == second.tokens
    assert len(first.tokens) == 40


def pool_names(engine: VllmEngine) -> set[int]:
    """Return the names of all blocks in vLLM's prefix cache."""
    blocks = engine._parts.core.block_pool.blocks
    return {short(get_block_hash(block.block_hash)) for block in blocks if block.block_hash is not None}


def on_device(changes: Sequence[Change]) -> list[Change]:
    return [change for change in changes if change.tier is Tier.DEVICE]


async def test_engine_reports_its_prefix_cache(
    engine: VllmEngine, front: Front, started: tuple[VllmEngine, Front, EngineInfo]
) -> None:
    """With a front end's block names, with several blocks of one name, and after evictions."""
    book, naming = started[2].cache, started[2].naming
    assert book is not None and naming is not None
    reported: set[int] = set()

    async def check() -> None:
        await idle(engine)
        _, changes = book.take()
        for change in on_device(changes):
            reported.difference_update(change.removed)
            reported.update(change.stored)
        _, held = book.snapshot()
        assert (
            reported == {name for change in on_device(held) for name in change.stored} == pool_names(engine)
        )

    book.take()
    reported.update(*(change.stored for change in on_device(book.snapshot()[1])))
    prompt = [7 * n % 199 for n in range(5 * BLOCK)]
    before = engine.stats()
    first = await front.run(engine, prompt, params(max_tokens=BLOCK))
    await check()
    names = block_names([*prompt, *first.tokens], naming)
    assert len(names) == 5 and all(map(book.holds, names))
    again = await front.run(engine, prompt, params(max_tokens=BLOCK))
    assert again.tokens == first.tokens
    after = engine.stats()
    assert after.prompt_tokens - before.prompt_tokens == 2 * len(prompt)
    assert after.cached_prompt_tokens - before.cached_prompt_tokens == 4 * BLOCK

    twins = [[*range(150), *prompt] for _ in range(2)]
    streams = [front.stream(each, params(max_tokens=2)) for each in twins]
    for stream in streams:
        front.submit(engine, stream)
    for stream in streams:
        await front.until(lambda stream=stream: stream.finished)  # type: ignore[misc]
    await check()
    for number in range(4):
        await front.run(engine, [(11 + number) * n % 197 for n in range(1_000)], params(max_tokens=2))
        await check()
    assert len(reported) <= KV_BLOCKS - 1


async def test_phases(engine: VllmEngine, front: Front) -> None:
    thinking = await front.run(engine, REASONING, params(logit_bias=NO_THINK_END, max_tokens=8))
    assert thinking.flags[0] is OutputFlag.PREFILL_DONE
    assert OutputFlag.REASONING_ENDED not in thinking.all_flags
    turning = await front.run(engine, REASONING, params(logit_bias={THINK_END: 100.0}, max_tokens=8))
    assert turning.flags[0] == OutputFlag.PREFILL_DONE | OutputFlag.REASONING_ENDED
    assert all(OutputFlag.REASONING_ENDED not in flags for flags in turning.flags[1:])
    answering = await front.run(engine, ANSWERING, params(max_tokens=8))
    assert answering.flags[0] == OutputFlag.PREFILL_DONE | OutputFlag.REASONING_ENDED
    stream = front.stream(REASONING, params(logit_bias=NO_THINK_END))
    front.submit(engine, stream)
    await front.until_tokens(stream, 3)
    (stats,) = engine.stats().requests
    assert (stats.phase, stats.state, stats.frontend_id) == (Phase.REASONING, "running", "front")
    assert stats.reasoning_tokens >= 3
    (the_same,) = engine.request_stats(["another", stream.request_id])
    assert (the_same.frontend_id, the_same.phase) == (stats.frontend_id, stats.phase)
    engine.abort([stream.key])


# ---- predicted lengths


async def test_predictions_are_reported_and_count_down(engine: VllmEngine, front: Front) -> None:
    """For every running request; the answer is the one that the model must give."""
    expected_task = task("abcd", 30, 10)
    sampling = params(max_tokens=800, ignore_eos=False)
    sampling.update_from_generation_config({}, EOS)
    stream = front.stream(encode_turns([("user", expected_task.prompt)]), sampling)
    other = front.stream(REASONING, params(logit_bias=NO_THINK_END, max_tokens=600))
    assert all(r.predicted_remaining_tokens is None for r in engine.stats().requests)
    front.submit(engine, stream)
    front.submit(engine, other)

    def all_predicted() -> bool:
        found = [r.predicted_remaining_tokens for r in engine.stats().requests]
        return len(found) == 2 and None not in found

    await front.until(all_predicted)
    first = engine.stats().requests[0].predicted_remaining_tokens
    assert first is not None and first >= 0
    await front.until(lambda: stream.finished)
    engine.abort([other.key])
    text = bytes(token for token in stream.tokens if token < 256).decode()
    assert text == expected_task.thought + expected_task.answer
    left = LengthPrediction(generated=40, remaining=30.0)
    assert [left.remaining_at(emitted) for emitted in (39, 40, 55, 90)] == [30.0, 30.0, 15.0, 0.0]


async def test_prediction_moves_with_its_request(engine: VllmEngine, front: Front) -> None:
    stream = front.stream(REASONING, params(logit_bias=NO_THINK_END, max_tokens=600))
    front.submit(engine, stream)
    await front.until(lambda: any(r.predicted_remaining_tokens is not None for r in engine.stats().requests))
    bundle = await take_out(engine, front, stream, 45)
    assert bundle.pause.predicted_remaining_tokens is not None
    await bundle.put_back(stream)
    assert [r.predicted_remaining_tokens is None for r in engine.stats().requests] == [False]
    engine.abort([stream.key])


async def test_hidden_states_belong_to_the_next_tokens(engine: VllmEngine, front: Front) -> None:
    """Each row, multiplied by the output layer, gives the next token of its request."""
    seen: list[StepStates] = []

    def take(states: StepStates) -> None:
        seen.append(states)
        tap.arm()

    tap = await engine._run(lambda parts: parts.core.tap(take))
    tap.arm()
    greedy = params(max_tokens=50)
    streams = [front.stream(prompt, greedy) for prompt in (ANSWERING, [*QUESTION] * 5, QUESTION)]
    for stream in streams:
        front.submit(engine, stream)
    await front.until(lambda: all(stream.finished for stream in streams))
    tap.close()
    with safe_open(MODEL_PATH / "model.safetensors", framework="pt") as file:
        head = file.get_tensor("lm_head.weight")
    by_id = {stream.request_id: stream for stream in streams}
    checked = 0
    for states in seen:
        best = (states.hidden @ head.T).argmax(-1).tolist()
        for request_id, generated, token in zip(states.request_ids, states.generated, best, strict=True):
            if generated >= 0:
                assert by_id[request_id].tokens[generated] == token
                checked += 1
    assert checked == 150


async def test_last_state_of_each_prompt_is_captured_in_any_step(engine: VllmEngine, front: Front) -> None:
    """It is the input of the first prediction; other steps and rows are not captured."""
    seen: list[StepStates] = []

    def take(states: StepStates) -> None:
        seen.append(states)
        tap.arm_for_prompts()

    tap = await engine._run(lambda parts: parts.core.tap(take))
    tap.arm_for_prompts()
    greedy = params(max_tokens=30)
    streams = [front.stream(prompt, greedy) for prompt in (ANSWERING, [*QUESTION] * 5, QUESTION)]
    for stream in streams:
        front.submit(engine, stream)
        await front.until_tokens(stream, 3)
    await front.until(lambda: all(stream.finished for stream in streams))
    tap.close()
    assert sorted(request_id for states in seen for request_id in states.request_ids) == sorted(
        stream.request_id for stream in streams
    )
    assert all(made == 0 for states in seen for made in states.generated)
    assert all(len(states.hidden) == len(states.request_ids) for states in seen)


async def test_engine_predictions_stay_within_the_length_limits(engine: VllmEngine, front: Front) -> None:
    """A thousand more tokens are predicted; max_tokens leaves five of eight, the model's length six."""
    stream = front.stream(REASONING, params(logit_bias=NO_THINK_END, max_tokens=600))
    front.submit(engine, stream)
    await front.until_tokens(stream, 3)

    def bounds(parts: EngineParts) -> tuple[float | None, ...]:
        (entry,) = parts.table
        made, prompt = entry.emitted, entry.request.num_prompt_tokens
        entry.prediction = LengthPrediction(made, 1_000.0)
        longest = entry.request.max_tokens
        entry.request.max_tokens = made + 5
        by_max_tokens = entry.predicted_remaining(8_192)
        by_length = entry.predicted_remaining(prompt + made + 4)
        most = entry.max_output_tokens(prompt + made + 4)
        entry.request.max_tokens = longest
        entry.prediction = None
        nothing = entry.predicted_remaining(8_192)
        return by_max_tokens, by_length, most - made, nothing

    assert await engine._run(bounds) == (5.0, 4.0, 4, None)
    engine.abort([stream.key])


# ---- migration


async def move_at(engine: VllmEngine, front: Front, stream: Stream, moments: Sequence[int]) -> bool:
    """Export and reimport the request at these token counts. Return False if it ended before."""
    try:
        for at in moments:
            bundle = await take_out(engine, front, stream, at)
            states = {stats.request_id: stats.state for stats in engine.stats().requests}
            assert states[stream.request_id] == "paused"
            await bundle.put_back(stream)
            await runs_again(front, stream)
    except EngineRefusal as refusal:
        # On a busy machine it can finish while its blocks are being copied.
        assert "has finished" in str(refusal)
        await front.until(lambda: stream.finished)
        await engine.export_resume(stream.request_id)
        return False
    return True


async def runs_again(front: Front, stream: Stream) -> None:
    """Wait for a token of a request that has come in, which counts as preempted before, or for its end."""
    made = len(stream.tokens)
    await front.until(lambda: stream.finished or len(stream.tokens) > made)


async def test_migration_does_not_change_outputs(
    engine: VllmEngine, front: Front, case: tuple[list[int], SamplingParams], reference: Stream
) -> None:
    """Migrate twice: a few tokens after the prompt, and later."""
    tries, moved = 0, False
    while not moved:
        tries += 1
        assert tries <= TRIES, "it ended before its second move each time"
        stream = front.stream(*case)
        front.submit(engine, stream)
        moved = await move_at(engine, front, stream, (2, 40))
    await front.until(lambda: stream.finished)
    assert_same(stream, reference)
    ended = [flags for flags in reference.flags if OutputFlag.REASONING_ENDED in flags]
    assert len([flags for flags in stream.flags if OutputFlag.REASONING_ENDED in flags]) == len(ended)
    assert sum(OutputFlag.PREFILL_DONE in flags for flags in stream.flags) == 1


async def test_migrations_among_other_requests(engine: VllmEngine, front: Front) -> None:
    """Migrate three times in a row, in a batch with other seeded requests."""
    kinds = [(REASONING, params(logit_bias=NO_THINK_END, **(SEEDED | {"seed": seed}))) for seed in range(4)]
    references = [await front.run(engine, *kind) for kind in kinds]
    tries, moved = 0, False
    while not moved:
        tries += 1
        assert tries <= TRIES, "it ended before its third move each time"
        streams = [front.stream(*kind) for kind in kinds]
        for stream in streams:
            front.submit(engine, stream)
        moved = await move_at(engine, front, streams[2], (10, 35, 60))
        await front.until(lambda streams=streams: all(stream.finished for stream in streams))  # type: ignore[misc]
    for stream, reference in zip(streams, references, strict=True):
        assert_same(stream, reference)


async def test_recovery_by_recompute(
    engine: VllmEngine, front: Front, case: tuple[list[int], SamplingParams], reference: Stream
) -> None:
    stream = front.stream(*case)
    stream.tokens = reference.tokens[:50]
    stream.logprobs = reference.logprobs[:50]
    stream.epoch = 2
    front.submit(engine, stream)
    await front.until(lambda: stream.finished)
    assert_same(stream, reference)
    assert OutputFlag.PREFILL_DONE in stream.flags[0]


async def test_replay_does_not_change_outputs(
    engine: VllmEngine, front: Front, case: tuple[list[int], SamplingParams], reference: Stream
) -> None:
    """Stop and recompute twice, each after a cancelled stop."""
    stream = front.stream(*case)
    front.submit(engine, stream)
    for at in (2, 40):
        await front.until_tokens(stream, at)
        exported = await engine.export_open(stream.request_id)
        await engine.export_stop(stream.request_id)
        await engine.export_resume(stream.request_id)
        await front.until_tokens(stream, at + 3)
        exported = await engine.export_open(stream.request_id)
        stopped = await engine.export_stop(stream.request_id)
        assert stream.tokens == [*exported.output_token_ids, *stopped.new_output_token_ids]
        assert engine.stats().requests[0].state == "paused"
        await engine.export_release(stream.request_id)
        await engine.replay_check(exported, stream.key)
        stream.epoch += 1
        front.submit(engine, stream, stopped.sampling_state)
    await front.until(lambda: stream.finished)
    assert_same(stream, reference)


async def test_engine_reports_held_requests_and_step_times(engine: VllmEngine, front: Front) -> None:
    stream = front.stream(REASONING, SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True))
    front.submit(engine, stream)
    unknown = RequestKey(0, 1 << 30)
    # The query is processed after the submission.
    assert await engine.find_held([stream.key, unknown]) == {stream.key: Held(1)}
    await front.until_tokens(stream, 50)
    assert await engine.find_held([stream.key]) == {stream.key: Held(1)}
    expected_s = engine.stats().expected_step_s
    assert expected_s is not None and 0 < expected_s < 30
    await front.until(lambda: stream.finished)
    assert await engine.find_held([stream.key]) == {}


async def test_recovery_of_a_prompt_that_takes_several_steps(engine: VllmEngine, front: Front) -> None:
    sampling = params(temperature=1.0, seed=21, max_tokens=80)
    prompt = [*QUESTION] * 8
    reference = await front.run(engine, prompt, sampling)
    stream = front.stream(prompt, sampling)
    stream.tokens = reference.tokens[:50]
    front.submit(engine, stream)
    await front.until(lambda: stream.finished)
    assert_same(stream, reference)


async def test_recovery_after_the_last_token_ends_the_request(engine: VllmEngine, front: Front) -> None:
    reference = await front.run(engine, ANSWERING, params(max_tokens=12))
    stream = front.stream(ANSWERING, params(max_tokens=12))
    stream.tokens = list(reference.tokens)
    front.submit(engine, stream)
    await front.until(lambda: stream.finished)
    assert stream.tokens == reference.tokens
    assert stream.finish_reason == FinishReason.LENGTH


async def test_newer_epoch_replaces_the_request(engine: VllmEngine, front: Front) -> None:
    """As when the front end considered this worker lost and later placed the request on it again."""
    sampling = params(**SEEDED)
    reference = await front.run(engine, ANSWERING, sampling)
    stream = front.stream(ANSWERING, sampling)
    front.submit(engine, stream)
    await front.until_tokens(stream, 20)
    bundle = Bundle(engine, stream.request_id)
    await bundle.open()
    await bundle.stop_and_copy()
    stream.epoch += 1
    front.submit(engine, stream)
    await front.until(lambda: stream.finished)
    assert_same(stream, reference)
    with pytest.raises(EngineRefusal, match="finished"):
        await engine.export_more(stream.request_id, 0)
    await engine.export_resume(stream.request_id)


# ---- pause and resume


async def test_resumed_request_is_unchanged(engine: VllmEngine, front: Front) -> None:
    sampling = params(**SEEDED)
    reference = await front.run(engine, ANSWERING, sampling)
    stream = front.stream(ANSWERING, sampling)
    front.submit(engine, stream)
    for at in (5, 30, 60):
        await take_out(engine, front, stream, at)
        before = len(stream.tokens)
        other = await front.run(engine, ANSWERING, params(max_tokens=10))
        assert len(other.tokens) == 10
        assert len(stream.tokens) == before
        await engine.export_resume(stream.request_id)
    await front.until(lambda: stream.finished)
    assert_same(stream, reference)


async def test_resume_into_a_full_batch(engine: VllmEngine, front: Front) -> None:
    """A paused request keeps its slot, however many requests wait."""
    paused = front.stream(ANSWERING, params())
    front.submit(engine, paused)
    await take_out(engine, front, paused, 5)
    crowd = [front.stream(ANSWERING, params(max_tokens=30)) for _ in range(20)]
    for stream in crowd:
        front.submit(engine, stream)
    await front.until_tokens(crowd[0], 3)
    assert sum(entry.state == "running" for entry in engine.stats().requests) == 15
    await engine.export_resume(paused.request_id)
    await front.until(lambda: paused.finished and all(stream.finished for stream in crowd))
    assert len(paused.tokens) == 110


# ---- refusals


async def test_refusals_at_the_source(engine: VllmEngine, front: Front) -> None:
    with pytest.raises(EngineRefusal, match="not running here"):
        await engine.export_open("nobody")
    stream = front.stream(ANSWERING, params(max_tokens=30))
    front.submit(engine, stream)
    await front.until_tokens(stream, 2)
    bundle = Bundle(engine, stream.request_id)
    await bundle.open()
    with pytest.raises(EngineRefusal, match="already being exported"):
        await engine.export_open(stream.request_id)
    await front.until(lambda: stream.finished)
    used = engine.stats().kv_blocks_used
    assert used == bundle.have > 0
    with pytest.raises(EngineRefusal, match="finished"):
        await engine.export_pause(stream.request_id, bundle.have)
    await engine.read_blocks(stream.request_id, 0, 1, engine.staging(1))
    await engine.export_resume(stream.request_id)
    with pytest.raises(EngineRefusal, match="not being exported"):
        await engine.read_blocks(stream.request_id, 0, 1, engine.staging(1))


async def test_refusals_at_the_target(engine: VllmEngine, front: Front) -> None:
    stream = front.stream(ANSWERING, params())
    front.submit(engine, stream)
    bundle = await take_out(engine, front, stream, 30)
    with pytest.raises(EngineRefusal, match=r"here already|already here"):
        await engine.import_open(bundle.exported, stream.key, 2)
    await engine.export_release(stream.request_id)
    await bundle.reserve(stream)
    with pytest.raises(EngineRefusal, match="have not arrived"):
        await engine.import_prepare(stream.request_id, bundle.pause)
    with pytest.raises(EngineRefusal, match="not prepared"):
        await engine.import_activate(stream.request_id)
    with pytest.raises(EngineRefusal, match="not all reserved"):
        await engine.write_blocks(stream.request_id, 60, 1, engine.staging(1), [0])
    await engine.import_drop(stream.request_id)
    named = replace(bundle.exported, frames=front.stream(ANSWERING, params(), adapter=("a", 7, "/a")).frames)
    for check in (
        engine.replay_check(named, stream.key),
        engine.import_open(named, stream.key, 2),
    ):
        with pytest.raises(EngineRefusal, match="adapter a: this engine accepts no adapters"):
            await check
    with pytest.raises(EngineRefusal, match="not being imported"):
        await engine.import_reserve(stream.request_id, 3)


async def test_import_without_room_reserves_nothing(engine: VllmEngine, front: Front) -> None:
    streams = [front.stream(ANSWERING, params()) for _ in range(2)]
    bundles = []
    for stream in streams:
        front.submit(engine, stream)
        bundles.append(await take_out(engine, front, stream, 30))
        await engine.export_release(stream.request_id)
    first, second = streams
    await bundles[0].reserve(first)
    most = 2048 // BLOCK
    with pytest.raises(EngineRefusal, match="no room"):
        await engine.import_reserve(first.request_id, most + 1)
    await engine.import_reserve(first.request_id, most)
    await bundles[1].reserve(second)
    used = engine.stats().kv_blocks_used
    with pytest.raises(EngineRefusal, match="no room"):
        await engine.import_reserve(second.request_id, most)
    assert engine.stats().kv_blocks_used == used
    await engine.import_drop(second.request_id)
    hog = front.stream(list(range(32, 128)) * 9, params(max_tokens=900, min_tokens=900))
    front.submit(engine, hog)
    await front.until_tokens(hog, 33)
    used = engine.stats().kv_blocks_used
    with pytest.raises(EngineRefusal, match="no room"):
        await engine.import_open(bundles[1].exported, second.key, 2)
    assert engine.stats().kv_blocks_used == pytest.approx(used, abs=1)
    engine.abort_client(0)


async def test_waiting_prompts_do_not_block_migrated_requests(engine: VllmEngine, front: Front) -> None:
    """Seats and KV are free, but not enough for the long waiting prompts: a migrated request is accepted."""
    reference = front.stream(ANSWERING, params(max_tokens=60))
    front.submit(engine, reference)
    await front.until(lambda: reference.finished)
    stream = front.stream(ANSWERING, params(max_tokens=60))
    front.submit(engine, stream)
    bundle = await take_out(engine, front, stream, 20)
    await engine.export_release(stream.request_id)
    hog = front.stream(list(range(32, 128)) * 12, params(max_tokens=600, min_tokens=600))
    front.submit(engine, hog)
    await front.until_tokens(hog, 2)
    # As many as the engine has slots, each longer than the KV that the hog leaves.
    for number in range(16):
        front.submit(engine, front.stream([number, *range(32, 128)] * 20, params(max_tokens=5)))
    await front.until_tokens(hog, 5)
    assert sum(entry.state == "waiting" for entry in engine.stats().requests) == 16
    await bundle.bring_in(stream)
    await front.until(lambda: stream.finished)
    assert_same(stream, reference)
    assert not hog.finished
    engine.abort_client(0)


async def test_import_is_refused_without_a_free_slot(engine: VllmEngine, front: Front) -> None:
    """Every slot is used, reserved or kept for a paused request."""
    paused, stream = (front.stream(ANSWERING, params()) for _ in range(2))
    for one in (paused, stream):
        front.submit(engine, one)
    await take_out(engine, front, paused, 5)
    bundle = await take_out(engine, front, stream, 5)
    await engine.export_release(stream.request_id)
    crowd = [front.stream(ANSWERING, params(max_tokens=400, ignore_eos=True)) for _ in range(15)]
    for one in crowd:
        front.submit(engine, one)
    await front.until_tokens(crowd[-1], 2)
    with pytest.raises(EngineRefusal, match="no room"):
        await bundle.reserve(stream)
    engine.abort([crowd[0].key])
    await bundle.reserve(stream)
    await engine.import_drop(stream.request_id)
    await engine.export_resume(paused.request_id)
    engine.abort_client(0)


async def test_waiting_import_gets_a_slot_before_waiting_prompts(engine: VllmEngine, front: Front) -> None:
    stream = front.stream(ANSWERING, params(max_tokens=60))
    front.submit(engine, stream)
    bundle = await take_out(engine, front, stream, 20)
    await engine.export_release(stream.request_id)
    crowd = [front.stream(ANSWERING, params(max_tokens=400)) for _ in range(20)]
    for one in crowd:
        front.submit(engine, one)
    await front.until_tokens(crowd[15], 2)
    waits = asyncio.ensure_future(engine.import_queue(bundle.exported, stream.key, stream.epoch + 1))
    gives_up = asyncio.ensure_future(engine.import_queue(bundle.exported, stream.key, stream.epoch + 1))
    with pytest.raises(EngineRefusal, match=r"here already|already here"):
        await gives_up
    await front.until_tokens(crowd[15], 6)
    assert not waits.done()
    assert [entry.state for entry in engine.stats().requests].count("waiting") == 4
    engine.abort([crowd[0].key])
    await waits
    # The import got the slot: four prompts still wait.
    assert [entry.state for entry in engine.stats().requests].count("waiting") == 4
    await engine.import_reserve(stream.request_id, bundle.have)
    await bundle.write()
    await engine.import_prepare(stream.request_id, bundle.pause)
    stream.epoch += 1
    await engine.import_activate(stream.request_id)
    await front.until(lambda: stream.finished)
    assert len(stream.tokens) == 60
    engine.abort_client(0)


async def test_waiting_import_can_be_dropped(engine: VllmEngine, front: Front) -> None:
    streams = [front.stream(ANSWERING, params()) for _ in range(3)]
    bundles = []
    for stream in streams:
        front.submit(engine, stream)
        bundles.append(await take_out(engine, front, stream, 5))
        await engine.export_release(stream.request_id)
    crowd = [front.stream(ANSWERING, params(max_tokens=400)) for _ in range(16)]
    for one in crowd:
        front.submit(engine, one)
    await front.until_tokens(crowd[-1], 2)
    tasks = [
        asyncio.ensure_future(engine.import_queue(bundle.exported, stream.key, 1))
        for bundle, stream in zip(bundles, streams, strict=True)
    ]
    await front.until_tokens(crowd[-1], 4)
    tasks[0].cancel()
    await engine.import_drop(streams[0].request_id)
    engine.abort([streams[1].key])
    with pytest.raises(EngineRefusal, match="dropped while it waited"):
        await tasks[1]
    with pytest.raises(EngineRefusal, match="imports wait for it"):
        await engine.import_open(bundles[0].exported, streams[0].key, 2)
    assert not tasks[2].done()
    engine.abort_client(0)
    with pytest.raises(EngineRefusal, match="dropped"):
        await tasks[2]


async def test_block_changed_in_transit_is_refused(engine: VllmEngine, front: Front) -> None:
    stream = front.stream(ANSWERING, params())
    front.submit(engine, stream)
    bundle = await take_out(engine, front, stream, 30)
    await engine.export_release(stream.request_id)
    await bundle.reserve(stream)
    first, number, staging, sums = bundle.parts[0]
    staging.bytes[1, 0, 17] ^= 4
    with pytest.raises(KvCorrupt, match="block 1"):
        await engine.write_blocks(stream.request_id, first, number, staging, sums)
    staging.bytes[1, 0, 17] ^= 4
    await bundle.write()
    pause = bundle.pause
    wrong = ExportedPause(
        [token ^ 1 for token in pause.new_output_token_ids],
        pause.computed_tokens,
        [b"not the hash", *pause.block_hashes[1:]],
        pause.sampling_state,
        0.0,
    )
    with pytest.raises(KvCorrupt, match="its tokens do not match"):
        await engine.import_prepare(stream.request_id, wrong)
    await engine.import_drop(stream.request_id)


async def test_checksums_identify_content(engine: VllmEngine, front: Front) -> None:
    stream = front.stream([*QUESTION] * 2, params())
    front.submit(engine, stream)
    await front.until_tokens(stream, 2)
    exported = await engine.export_open(stream.request_id)
    number = len(exported.block_hashes)
    out = engine.staging(number)
    sums = await engine.read_blocks(stream.request_id, 0, number, out)
    again = await engine.read_blocks(stream.request_id, 0, number, engine.staging(number))
    assert sums == again
    assert len(set(sums)) == number == len(set(exported.block_hashes))
    held = out.buffer
    assert isinstance(held, np.ndarray)
    assert held.nbytes == number * (await shape_bytes(engine))
    engine.abort([stream.key])
    await engine.export_resume(stream.request_id)


async def shape_bytes(engine: VllmEngine) -> int:
    one = engine.staging(1)
    assert isinstance(one, DeviceStaging)
    return int(one.bytes.numel())


@pytest.mark.parametrize(
    "frames",
    [[b"\x00garbage"], [], "long", "vocabulary", "patterns"],
    ids=["garbage", "nothing", "long", "vocabulary", "patterns"],
)
async def test_impossible_request_is_answered_with_failed(
    engine: VllmEngine, front: Front, frames: list[bytes] | str
) -> None:
    if frames == "long":
        stream = front.stream([5] * 3000, params())
    elif frames == "vocabulary":
        stream = front.stream([5, 70_000], params())
    elif frames == "patterns":
        wide = RepetitionDetectionParams(10**9, 200, 2)
        stream = front.stream(ANSWERING, params(repetition_detection=wide))
    else:
        stream = front.stream(ANSWERING, params())
        assert not isinstance(frames, str)
        stream.frames = frames
    front.submit(engine, stream)
    await front.until(lambda: stream.finished)
    assert OutputFlag.FAILED in stream.all_flags
    assert stream.finish_reason == FinishReason.ERROR
    # Other engines could not run it either.
    assert isinstance(stream.refusal, Unrunnable) and str(stream.refusal)


# ---- aborts


async def test_abort_frees_a_running_request(engine: VllmEngine, front: Front) -> None:
    stream = front.stream(ANSWERING, params())
    front.submit(engine, stream)
    await front.until_tokens(stream, 5)
    engine.abort([stream.key, RequestKey(0, 99_999)])


async def test_abort_frees_a_waiting_request(engine: VllmEngine, front: Front) -> None:
    streams = [front.stream(ANSWERING, params()) for _ in range(20)]
    for stream in streams:
        front.submit(engine, stream)
    await front.until_tokens(streams[0], 2)
    assert [entry.state for entry in engine.stats().requests].count("waiting") == 4
    engine.abort([stream.key for stream in reversed(streams)])


async def test_abort_frees_a_paused_request_except_exported_blocks(engine: VllmEngine, front: Front) -> None:
    stream = front.stream(ANSWERING, params())
    front.submit(engine, stream)
    bundle = await take_out(engine, front, stream, 30)
    engine.abort([stream.key])
    await idle(engine)
    assert engine.stats().requests == []
    assert engine.stats().kv_blocks_used == bundle.have
    await engine.export_release(stream.request_id)


async def test_abort_frees_an_import_at_every_step(engine: VllmEngine, front: Front) -> None:
    stream = front.stream(ANSWERING, params(**SEEDED))
    front.submit(engine, stream)
    bundle = await take_out(engine, front, stream, 30)
    await engine.export_release(stream.request_id)
    for steps in range(4):
        await bundle.reserve(stream)
        if steps > 0:
            await bundle.write()
        if steps > 1:
            await engine.import_prepare(stream.request_id, bundle.pause)
        if steps > 2:
            stream.epoch += 1
            await engine.import_activate(stream.request_id)
            await front.until(lambda: len(stream.tokens) > len(bundle.exported.output_token_ids) + 10)
        engine.abort([stream.key])
        await idle(engine)
        assert engine.stats().kv_blocks_used == 0


async def test_dropping_an_import_waits_for_the_copy_into_it(engine: VllmEngine, front: Front) -> None:
    stream = front.stream(ANSWERING, params())
    front.submit(engine, stream)
    bundle = await take_out(engine, front, stream, 60)
    await engine.export_release(stream.request_id)
    await bundle.reserve(stream)
    writing = asyncio.create_task(bundle.write())
    await engine.import_drop(stream.request_id)
    with pytest.raises(EngineRefusal):
        await writing
        await bundle.write()


async def test_blocks_in_the_prefix_cache_are_not_written(engine: VllmEngine, front: Front) -> None:
    """They belong to the reservation from the start: they are neither evicted nor written."""
    prompt = [n * n % 251 for n in range(6 * BLOCK)]
    # Enough for the export to begin before the end, on a busy machine too.
    sampling = params(temperature=1.0, seed=2, max_tokens=200)
    reference = await front.run(engine, prompt, sampling)
    stream = front.stream(prompt, sampling)
    front.submit(engine, stream)
    bundle = await take_out(engine, front, stream, 30)
    await engine.export_release(stream.request_id)
    await engine.import_open(bundle.exported, stream.key, 2)
    held = engine.import_cached(stream.request_id)
    assert held == len(bundle.exported.block_hashes) >= 6
    await engine.import_reserve(stream.request_id, bundle.have)
    assert engine.stats().kv_blocks_used <= bundle.have + 2
    first, _, staging, sums = bundle.parts[0]
    with pytest.raises(EngineRefusal, match=r"here already|already here"):
        await engine.write_blocks(stream.request_id, first, 1, staging.part(0, 1), sums[:1])
    # All other blocks are used in turn, several times.
    for number in range(3):
        await front.run(engine, [(3 + number) * n % 193 for n in range(60 * BLOCK)], params(max_tokens=2))
    await bundle.write()
    await engine.import_prepare(stream.request_id, bundle.pause)
    stream.epoch += 1
    await engine.import_activate(stream.request_id)
    await front.until(lambda: stream.finished)
    assert_same(stream, reference)
    # When the import is dropped, they return to the cache.
    await idle(engine)
    await engine.import_open(bundle.exported, stream.key, 3)
    assert engine.import_cached(stream.request_id) == held
    await engine.import_drop(stream.request_id)
    again = await front.run(engine, prompt, sampling)
    assert_same(again, reference)


async def test_prefix_from_another_worker_is_found(engine: VllmEngine, front: Front) -> None:
    """It is lent, dropped from the cache, fetched into other blocks and found: the answer is the same."""
    prompt = [n * n % 241 for n in range(9 * BLOCK + 5)]
    sampling = params(temperature=1.0, seed=6, max_tokens=40)
    reference = await front.run(engine, prompt, sampling)
    stream = front.stream(prompt, sampling)
    submission = Submission(stream.key, stream.request_id, 1, stream.frames)
    assert await engine.fetch_missing(submission) == []
    assert await engine.fetch_open("held", submission, 1 << 20) == []
    names = await engine._run(
        lambda parts: [bytes(name) for name in parts.core.decode(stream.frames, 0).block_hashes]
    )
    assert await engine.loan_open("loan", names) == 9
    assert await engine.loan_open("other", [b"unknown", *names]) == 0
    await forget_prefixes(engine)
    used = engine.stats().kv_blocks_used
    assert await engine.fetch_missing(submission) == names[:9]
    assert engine.stats().kv_blocks_used == used
    assert await engine.fetch_open("fetch", submission, 7 * BLOCK + 3) == names[:7]
    with pytest.raises(EngineRefusal, match="have not arrived"):
        await engine.fetch_keep("fetch", 5)
    staging = engine.staging(6)
    assert isinstance(staging, DeviceStaging)
    sums = await engine.read_blocks("loan", 0, 6, staging)
    staging.bytes[2, 0, 3] ^= 1
    with pytest.raises(KvCorrupt, match="block 2"):
        await engine.write_blocks("fetch", 0, 6, staging, sums)
    staging.bytes[2, 0, 3] ^= 1
    await engine.write_blocks("fetch", 0, 6, staging, sums)
    with pytest.raises(EngineRefusal, match="do not come"):
        await engine.write_blocks("fetch", 7, 1, staging.part(0, 1), sums[:1])
    await engine.fetch_keep("fetch", 6)
    await engine.fetch_drop("fetch")
    await engine.fetch_drop("fetch")
    await engine.loan_end("loan")
    await engine.loan_end("other")
    await idle(engine)
    assert engine.stats().kv_blocks_used == 0
    before = engine.stats().cached_prompt_tokens
    front.submit(engine, stream)
    await front.until(lambda: stream.finished)
    assert_same(stream, reference)
    assert engine.stats().cached_prompt_tokens - before == 6 * BLOCK
    # Lent blocks are not evicted, and without room nothing is fetched.
    assert await engine.loan_open("all", names) == 9
    hog = front.stream([n * 7 % 199 for n in range(60 * BLOCK)], params(max_tokens=100))
    front.submit(engine, hog)
    await front.until_tokens(hog, 3)
    other = front.stream([n * 11 % 197 for n in range(50 * BLOCK)], params())
    with pytest.raises(NoRoom):
        await engine.fetch_open("large", Submission(other.key, other.request_id, 1, other.frames), 1 << 20)
    plain = front.stream(prompt, params(prompt_logprobs=1))
    with pytest.raises(EngineRefusal, match="not read the cache"):
        await engine.fetch_open("none", Submission(plain.key, plain.request_id, 1, plain.frames), 1 << 20)
    engine.abort_client(0)
    await engine.loan_end("all")


async def test_abort_client_frees_only_that_client(engine: VllmEngine, front: Front) -> None:
    mine = front.stream(ANSWERING, params())
    other = front.stream(ANSWERING, params(max_tokens=50))
    other.key = RequestKey(1, other.key.handle)
    front.submit(engine, mine)
    front.submit(engine, other)
    await front.until_tokens(mine, 3)
    engine.abort_client(0)
    await front.until(lambda: other.finished)
    assert len(other.tokens) == 50
    assert not mine.finished


# ---- memory pressure


async def test_preemption_during_an_export(engine: VllmEngine, front: Front) -> None:
    """With too many long requests for the KV cache vLLM preempts; pinned blocks stay intact."""
    sampling = params(max_tokens=330, **SEEDED)
    reference = await front.run(engine, ANSWERING, sampling)
    # Takes more than a third of the KV blocks.
    hog = front.stream([n * n % 251 for n in range(36 * BLOCK)], params(max_tokens=800))
    front.submit(engine, hog)
    streams = [front.stream(ANSWERING, sampling) for _ in range(6)]
    for stream in streams:
        front.submit(engine, stream)
    last = streams[-1]
    await front.until_tokens(last, 60)
    bundle = Bundle(engine, last.request_id)
    await bundle.open()
    before = engine.stats().preemptions
    await front.until(lambda: engine.stats().preemptions > before)
    states = {entry.request_id: entry.state for entry in engine.stats().requests}
    if states[last.request_id] != "running":
        # It may as well be read from host memory.
        await bundle.stop_and_copy()
        await engine.export_resume(last.request_id)
        bundle = Bundle(engine, last.request_id)
        await bundle.open()
    engine.abort([hog.key, *(stream.key for stream in streams[:3])])
    count = len(last.tokens)
    await front.until(lambda: len(last.tokens) > count + 3)
    await bundle.more()
    await bundle.stop_and_copy()
    await bundle.put_back(last)
    await front.until(lambda: all(stream.finished for stream in streams[3:]))
    for stream in streams[3:]:
        assert_same(stream, reference)


# ---- everything at once


async def test_random_migrations_pauses_recoveries_and_aborts(engine: VllmEngine, front: Front) -> None:
    """Six seeded streams under memory pressure, each disturbed at random: their outputs do not change."""
    chance = random.Random(20261121)
    kinds = [
        (
            [*QUESTION[: chance.randrange(20, len(QUESTION))], 259],
            params(
                max_tokens=chance.randrange(100, 150), logit_bias=NO_THINK_END, **(SEEDED | {"seed": seed})
            ),
        )
        for seed in range(6)
    ]
    references = [await front.run(engine, *kind) for kind in kinds]
    streams = [front.stream(*kind) for kind in kinds]
    aborted = [front.stream(ANSWERING, params(max_tokens=1500, min_tokens=1500)) for _ in range(6)]
    for stream in [*streams, *aborted]:
        front.submit(engine, stream)
    moved = 0
    async with asyncio.timeout(WAIT_S):
        while not all(stream.finished for stream in streams):
            stream = chance.choice([stream for stream in streams if not stream.finished])
            if chance.random() < 0.2 and aborted:
                engine.abort([aborted.pop().key])
            moved += await disturb(engine, front, stream, chance)
    engine.abort([stream.key for stream in aborted])
    assert moved >= 3
    for stream, reference in zip(streams, references, strict=True):
        assert_same(stream, reference)


async def disturb(engine: VllmEngine, front: Front, stream: Stream, chance: random.Random) -> int:
    """Migrate the stream, pause it for a while, or lose it. Return 1 if it was migrated."""
    bundle = Bundle(engine, stream.request_id)
    count = len(stream.tokens)
    await front.until(lambda: stream.finished or len(stream.tokens) > count + 2)
    try:
        await bundle.open()
        await bundle.more()
        await bundle.stop_and_copy()
    except EngineRefusal:
        await engine.export_resume(stream.request_id)
        return 0
    kind = chance.choice(["migrate", "migrate", "resume", "lose"])
    if kind == "resume":
        await engine.export_resume(stream.request_id)
        return 0
    await engine.export_release(stream.request_id)
    if kind == "migrate":
        try:
            await bundle.bring_in(stream)
        except EngineRefusal:
            await engine.import_drop(stream.request_id)
        else:
            return 1
    stream.epoch += 1
    front.submit(engine, stream)
    return 0


# ---- invalid input from peers


async def test_invalid_input_from_a_peer_does_not_end_the_engine(engine: VllmEngine, front: Front) -> None:
    stream = front.stream(ANSWERING, params(**SEEDED))
    front.submit(engine, stream)
    bundle = await take_out(engine, front, stream, 30)
    await engine.export_release(stream.request_id)
    garbage = replace(bundle.exported, frames=[b"\xc1"])
    with pytest.raises(EngineRefusal):
        await engine.import_open(garbage, stream.key, 2)
    await bundle.reserve(stream)
    await bundle.write()
    with pytest.raises(EngineRefusal):
        await engine.import_prepare(stream.request_id, replace(bundle.pause, sampling_state=b"?"))
    with pytest.raises(EngineRefusal):
        await engine.import_prepare(stream.request_id, replace(bundle.pause, computed_tokens=7))
    await engine.import_drop(stream.request_id)
    await front.run(engine, ANSWERING, params(max_tokens=3))


# ---- utility calls


async def test_a_cpu_engine_keeps_evicted_prefixes_only_if_told_to(engine: VllmEngine) -> None:
    """Without `host_kv_bytes`, only preempted requests use host memory."""

    def facts(parts: EngineParts) -> tuple[str, bool, int]:
        core = parts.core
        return core.no_host_tier_reason, core.block_pool.metrics_collector is None, core.host.total

    reason, unobserved, slots = await engine._run(facts)
    assert "--host-kv-bytes" in reason and unobserved and slots


async def test_utility_calls(engine: VllmEngine, front: Front) -> None:
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    for call_id, method in ((1, "get_supported_tasks"), (2, "sleep")):
        engine.utility(0, call_id, [bytes(frame) for frame in encoder.encode((0, call_id, method, ()))])
    await front.until(lambda: {1, 2} <= front.utilities.keys())
    answer: EngineCoreOutputs = decoder.decode(front.utilities[1])
    assert "generate" in answer.utility_output.result.result
    refused: EngineCoreOutputs = decoder.decode(front.utilities[2])
    assert "not available on a fleet" in refused.utility_output.failure_message


# ---- plain vLLM comes last, as it starts during all other tests


async def test_tokens_equal_those_of_plain_vllm(
    engine: VllmEngine, front: Front, plain_vllm: subprocess.Popen[str]
) -> None:
    """With greedy and with seeded sampling."""
    output, _ = await asyncio.to_thread(plain_vllm.communicate, timeout=WAIT_S)
    result = next(line for line in output.splitlines() if line.startswith("RESULT "))
    expected = json.loads(result.removeprefix("RESULT "))
    for (prompt, arguments), tokens in zip(PLAIN_REQUESTS, expected, strict=True):
        stream = await front.run(engine, prompt, SamplingParams(**arguments))
        assert stream.tokens == tokens
        assert stream.finish_reason == FinishReason.LENGTH
