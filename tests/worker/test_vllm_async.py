"""The vLLM engine with async scheduling: a step begins before the tokens of the previous one are known.

All answers are compared with those of an engine without it. Most tests are those of test_vllm_engine.py.
`make test` runs them here or there: of those with `case`, each case in one of the two; the others here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tailrace.tiny import MODEL_PATH, REASONING_PARSER

pytest.importorskip("vllm", reason="the vLLM engine is not installed")

from vllm.sampling_params import SamplingParams

from tests.worker.test_vllm_engine import (  # noqa: F401
    CASES,
    KV_BLOCKS,
    NO_THINK_END,
    REASONING,
    SAMPLE,
    SEEDED,
    assert_same,
    case_of,
    idle,
    nothing_left,
    params,
    test_abort_frees_a_paused_request_except_exported_blocks,
    test_abort_frees_an_import_at_every_step,
    test_hidden_states_belong_to_the_next_tokens,
    test_migration_does_not_change_outputs,
    test_newer_epoch_replaces_the_request,
    test_preemption_during_an_export,
    test_random_migrations_pauses_recoveries_and_aborts,
    test_recovery_by_recompute,
    test_recovery_of_a_prompt_that_takes_several_steps,
    test_refusals_at_the_source,
    test_resume_into_a_full_batch,
    test_resumed_request_is_unchanged,
)
from tests.worker.vllm_bundle import Bundle, take_out
from tests.worker.vllm_front import Front, Stream
from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.vllm.core import EngineParts
from worker_agent.engine.vllm.engine import VllmEngine
from worker_agent.settings import EngineOptions

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

SEED = SEEDED | {"seed": 31}


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.slow if name in SAMPLE else []) for name in CASES],
    ids=lambda name: name.replace(" ", "-"),
)
def case(request: pytest.FixtureRequest) -> tuple[list[int], SamplingParams]:
    return case_of(request.param)


@dataclass(frozen=True)
class Before:
    """Results of an engine without async scheduling: complete answers, and an exported request."""

    answers: dict[str, Stream]
    stream: Stream
    bundle: Bundle


def engine_with(async_scheduling: bool) -> VllmEngine:
    return VllmEngine(
        EngineOptions(
            model=str(MODEL_PATH),
            kv_blocks=KV_BLOCKS,
            arguments={
                "dtype": "float32",
                "max_num_seqs": 16,
                "max_model_len": 2048,
                "reasoning_parser": REASONING_PARSER,
                "async_scheduling": async_scheduling,
                "max_num_batched_tokens": 256,
            },
        )
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def before() -> Before:
    engine, front = engine_with(async_scheduling=False), Front()
    await engine.start(front)
    answers = {name: await front.run(engine, *case_of(name)) for name in CASES}
    answers["moved"] = await front.run(engine, REASONING, params(logit_bias=NO_THINK_END, **SEED))
    stream = front.stream(REASONING, params(logit_bias=NO_THINK_END, **SEED))
    front.submit(engine, stream)
    bundle = await take_out(engine, front, stream, 30)
    await engine.export_release(stream.request_id)
    await engine.stop()
    return Before(answers, stream, bundle)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(before: Before) -> AsyncIterator[tuple[VllmEngine, Front]]:
    engine, front = engine_with(async_scheduling=True), Front()
    await engine.start(front)
    assert await engine._run(lambda parts: parts.core.core.batch_queue is not None)
    yield engine, front
    await engine.stop()


async def test_answers_equal_those_without_async_scheduling(
    request: pytest.FixtureRequest, reference: Stream, before: Before
) -> None:
    assert_same(reference, before.answers[request.node.callspec.params["case"]])


async def test_request_moves_from_an_engine_without_async_scheduling(
    engine: VllmEngine, front: Front, before: Before
) -> None:
    stream, bundle = before.stream, before.bundle
    front.streams[stream.key.handle] = stream
    bundle.engine = engine
    await bundle.bring_in(stream)
    await front.until(lambda: stream.finished)
    assert_same(stream, before.answers["moved"])


async def test_pause_waits_for_the_step_in_flight_and_others_continue(
    engine: VllmEngine, front: Front
) -> None:
    streams = [
        front.stream(REASONING, params(logit_bias=NO_THINK_END, max_tokens=400, **SEED)) for _ in range(3)
    ]
    for stream in streams:
        front.submit(engine, stream)
    paused = streams[0]
    await front.until_tokens(streams[-1], 20)
    bundle = Bundle(engine, paused.request_id)
    await bundle.open()

    def in_flight(parts: EngineParts) -> int:
        entry = parts.table.get(paused.request_id)
        assert entry is not None
        return int(entry.request.num_in_flight_tokens)

    assert await engine._run(in_flight) == 1
    await bundle.stop_and_copy()
    assert await engine._run(in_flight) == 0
    assert bundle.pause.computed_tokens == len(REASONING) + len(paused.tokens) - 1
    count, other = len(paused.tokens), len(streams[1].tokens)
    await front.until_tokens(streams[1], other + 20)
    assert len(paused.tokens) == count
    await engine.export_resume(paused.request_id)
    await front.until(lambda: all(stream.finished for stream in streams))
    for stream in streams[1:]:
        assert_same(paused, stream)


async def test_step_in_flight_may_end_the_request(engine: VllmEngine, front: Front) -> None:
    """A pause is requested while the last token is generated: the request ends here, and only here."""
    stream = front.stream(REASONING, params(logit_bias=NO_THINK_END, max_tokens=40))
    front.submit(engine, stream)
    await front.until_tokens(stream, 9)
    await engine.export_open(stream.request_id)
    answers: list[object] = []

    def pause_at_the_end(parts: EngineParts) -> None:
        entry = parts.table.get(stream.request_id)
        assert entry is not None
        while entry.request.num_output_tokens < 39:
            parts.core.step_now()
        parts.exports.pause(stream.request_id, 0, 0.0, answers.append)
        assert not answers

    await engine._run(pause_at_the_end)
    await front.until(lambda: stream.finished)
    await idle(engine)
    assert len(stream.tokens) == 40
    assert len(answers) == 1 and "has finished" in str(answers[0])
    await engine.export_resume(stream.request_id)


async def test_pause_cancelled_while_it_waits(engine: VllmEngine, front: Front) -> None:
    sampling = params(logit_bias=NO_THINK_END, **SEED)
    reference = await front.run(engine, REASONING, sampling)
    stream = front.stream(REASONING, sampling)
    front.submit(engine, stream)
    await front.until_tokens(stream, 20)
    await engine.export_open(stream.request_id)
    answers: list[object] = []

    def pause_and_resume(parts: EngineParts) -> None:
        parts.exports.pause(stream.request_id, 0, 0.0, answers.append)
        parts.exports.resume(stream.request_id)

    await engine._run(pause_and_resume)
    assert len(answers) == 1 and isinstance(answers[0], EngineRefusal)
    await front.until(lambda: stream.finished)
    assert_same(stream, reference)
