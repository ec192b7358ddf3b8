"""vLLM's engine serves its requests in the order of an intra-instance policy."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import pytest_asyncio

from tailrace.tiny import MODEL_PATH, REASONING_PARSER

pytest.importorskip("vllm", reason="the vLLM engine is not installed")

from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request

from tailrace.cluster import Phase
from tailrace.intra.base import IntraPolicy, JobView, Rank
from tailrace.intra.earliest_due import RANK_TOKENS, EarliestDue
from tailrace.intra.guarded import GuardedOrder, log_mistake
from tailrace.intra.orders import DecodeFirst, Fcfs, QuantumRoundRobin
from tailrace.intra.pascal import PascalQueue
from tailrace.intra.registry import UnknownIntraError
from tests.waiting import WAIT_S
from tests.worker.orders import ByLength, Mistaken, Stingy
from tests.worker.test_vllm_engine import ANSWERING, NO_THINK_END, QUESTION, REASONING, idle, params
from tests.worker.vllm_front import Front, Stream
from worker_agent.engine.errors import EngineRefusal, Unrunnable
from worker_agent.engine.vllm import requests
from worker_agent.engine.vllm.core import use_policy
from worker_agent.engine.vllm.engine import VllmEngine
from worker_agent.engine.vllm.ranked_queue import RankedQueue
from worker_agent.settings import EngineOptions

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

SEATS = 2
STEP_TOKENS = 64
# Shares no prefix with cached blocks.
UNSEEN = [*reversed(QUESTION)]
THINKING = {"logit_bias": NO_THINK_END}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started() -> AsyncIterator[tuple[VllmEngine, Front]]:
    """An engine with memory for all requests but only two slots, so that the order matters."""
    engine = VllmEngine(
        EngineOptions(
            model=str(MODEL_PATH),
            kv_blocks=97,
            arguments={
                "dtype": "float32",
                "max_num_seqs": SEATS,
                "max_model_len": 1024,
                "reasoning_parser": REASONING_PARSER,
                "max_num_batched_tokens": STEP_TOKENS,
            },
        )
    )
    front = Front()
    await engine.start(front)
    yield engine, front
    await engine.stop()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def nothing_left(engine: VllmEngine, front: Front) -> AsyncIterator[None]:
    yield
    await idle(engine)
    stats = engine.stats()
    engine.abort_client(0)
    engine.set_intra("vllm")
    assert (stats.kv_blocks_used, stats.host_kv_bytes_used, stats.requests) == (0, 0, [])
    assert not front.dead


async def serve_by(engine: VllmEngine, policy: IntraPolicy | None) -> None:
    """Use this policy, with its own parameters."""
    await engine._run(lambda parts: use_policy(policy, parts))


def submit_together(engine: VllmEngine, front: Front, streams: list[Stream]) -> None:
    """Submit all in one command between two steps, so that arrival times do not determine the order."""
    for stream in streams:
        front.submit(engine, stream)


async def order_of_completion(front: Front, streams: list[Stream]) -> list[int]:
    """Wait for all streams and return their indices in the order in which they ended."""
    order: list[int] = []

    def all_finished() -> bool:
        for number, stream in enumerate(streams):
            if stream.finished and number not in order:
                order.append(number)
        return len(order) == len(streams)

    await front.until(all_finished)
    return order


async def test_first_come_first_served(engine: VllmEngine, front: Front) -> None:
    await serve_by(engine, Fcfs())
    lengths = [40, 60, 5, 5]
    streams = [front.stream(ANSWERING, params(max_tokens=length)) for length in lengths]
    submit_together(engine, front, streams)
    assert await order_of_completion(front, streams) == [0, 2, 3, 1]
    assert engine.stats().swaps_out == 0


async def test_reasoning_preempts_answering(engine: VllmEngine, front: Front) -> None:
    """PASCAL: two answering requests fill the batch; two reasoning ones arrive and end first."""
    await serve_by(engine, PascalQueue())
    answers = [front.stream(ANSWERING, params(max_tokens=80)) for _ in range(2)]
    submit_together(engine, front, answers)
    for answer in answers:
        await front.until_tokens(answer, 2)
    thoughts = [front.stream(REASONING, params(max_tokens=30, **THINKING)) for _ in range(2)]
    submit_together(engine, front, thoughts)
    for thought in thoughts:
        await front.until_tokens(thought, 1)
    states = {entry.request_id: entry.state for entry in engine.stats().requests}
    assert [states[answer.request_id] for answer in answers] == ["preempted", "preempted"]
    assert sorted((await order_of_completion(front, [*answers, *thoughts]))[:2]) == [2, 3]


async def test_long_reasoning_is_demoted(engine: VllmEngine, front: Front) -> None:
    """Beyond the threshold it ranks as an answer, and a new reasoning request takes its slot."""
    await serve_by(engine, PascalQueue(demotion_tokens=len(REASONING) + 20))
    old = [front.stream(REASONING, params(max_tokens=120, **THINKING)) for _ in range(SEATS)]
    submit_together(engine, front, old)
    for stream in old:
        await front.until_tokens(stream, 30)
    assert [entry.demoted for entry in engine.stats().requests] == [True, True]
    new = front.stream(REASONING, params(max_tokens=10, **THINKING))
    front.submit(engine, new)
    assert (await order_of_completion(front, [*old, new]))[0] == 2


async def test_quanta_alternate(engine: VllmEngine, front: Front) -> None:
    """Round robin: no request is more than a quantum and a step ahead of a waiting one."""
    quantum = 10
    await serve_by(engine, QuantumRoundRobin(quantum_tokens=quantum))
    streams = [front.stream(ANSWERING, params(max_tokens=60)) for _ in range(4)]
    submit_together(engine, front, streams)
    await front.until(lambda: all(stream.tokens for stream in streams))
    spread = 0

    def seen() -> bool:
        nonlocal spread
        if all(stream.finished for stream in streams):
            return True
        token_counts = [len(stream.tokens) for stream in streams]
        spread = max(spread, max(token_counts) - min(token_counts))
        return False

    await front.until(seen)
    assert quantum <= spread <= 2 * quantum
    assert engine.stats().swaps_in > 0


async def test_answer_far_ahead_of_its_reader_yields(engine: VllmEngine, front: Front) -> None:
    """Two answers fill the batch; once they are far enough ahead, a prompt takes the slot of one."""
    await serve_by(engine, EarliestDue(lead_s=100.0, pace_s=10.0))
    swaps = engine.stats().swaps_in
    answers = [front.stream(ANSWERING, params(max_tokens=120)) for _ in range(SEATS)]
    submit_together(engine, front, answers)
    for answer in answers:
        await front.until_tokens(answer, RANK_TOKENS + 1)
    prompt = front.stream(ANSWERING, params(max_tokens=5))
    front.submit(engine, prompt)
    assert (await order_of_completion(front, [*answers, prompt]))[0] == SEATS
    assert engine.stats().swaps_in > swaps


async def test_prompt_that_missed_its_slo_is_ordered_last(engine: VllmEngine, front: Front) -> None:
    await serve_by(engine, EarliestDue(ttft_slo_s=100.0, late_s=2_000.0, lead_s=1e6))
    answers = [front.stream(ANSWERING, params(max_tokens=60)) for _ in range(SEATS)]
    submit_together(engine, front, answers)
    for answer in answers:
        await front.until_tokens(answer, 2)
    late = front.stream(ANSWERING, params(max_tokens=40), waited_s=1_000.0)
    fresh = [front.stream(ANSWERING, params(max_tokens=5)) for _ in range(SEATS)]
    submit_together(engine, front, [late, *fresh])
    assert (await order_of_completion(front, [*answers, late, *fresh]))[-1] == SEATS


async def test_prompt_waits_while_tokens_come_too_far_apart(
    engine: VllmEngine, front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The engine of these tests has two seats.
    monkeypatch.setattr("worker_agent.engine.step_order.FEWEST_DECODING", 1)
    order = EarliestDue(ttft_slo_s=1e6, late_s=1e7, tpot_slo_s=0.14, tpot_limit=1e-6)
    await serve_by(engine, order)
    recent = engine._parts.writer.intervals
    # An engine learns within a second how fast it is at most.
    while recent.summary(time.monotonic(), time.time()) is None:
        await front.run(engine, ANSWERING, params(max_tokens=100))
    streams = [front.stream(ANSWERING, params(max_tokens=length)) for length in (300, 5)]
    front.submit(engine, streams[0])
    await front.until_tokens(streams[0], 10)
    front.submit(engine, streams[1])
    assert await order_of_completion(front, streams) == [0, 1]
    assert engine.stats().kept_back_steps > 0


async def test_decodes_precede_prompts(engine: VllmEngine, front: Front) -> None:
    """A prompt of many steps does not delay decodes: each of its chunks runs along with a decoded token."""
    await serve_by(engine, DecodeFirst())
    decode = front.stream(ANSWERING, params(max_tokens=200))
    front.submit(engine, decode)
    await front.until_tokens(decode, 3)
    long = UNSEEN[1:] * 9
    prompt = front.stream(long, params(max_tokens=3))
    front.submit(engine, prompt)
    before = len(decode.tokens)
    await front.until_tokens(prompt, 1)
    assert len(decode.tokens) - before >= len(long) // STEP_TOKENS
    await front.until(lambda: prompt.finished and decode.finished)


async def test_prompt_overtakes_one_that_has_begun(engine: VllmEngine, front: Front) -> None:
    preemptions = engine.stats().preemptions
    # Slow enough that the test sees it in progress.
    await serve_by(engine, Stingy(1))
    # These share no prefix with cached blocks either.
    long, short = UNSEEN[2:] * 9, UNSEEN[5:30]
    first = front.stream(long, params(max_tokens=3))
    front.submit(engine, first)
    async with asyncio.timeout(WAIT_S):
        while not 0 < engine.stats().prefill_backlog_tokens < len(long):
            await idle(engine)
    second = front.stream(short, params(max_tokens=3))
    front.submit(engine, second)
    await serve_by(engine, ByLength())
    assert await order_of_completion(front, [first, second]) == [1, 0]
    assert engine.stats().preemptions == preemptions
    for stream, prompt in ((first, long), (second, short)):
        assert stream.tokens == (await front.run(engine, prompt, params(max_tokens=3))).tokens


async def test_step_is_within_the_prefill_budget_of_the_policy(engine: VllmEngine, front: Front) -> None:
    await serve_by(engine, Stingy(8))
    steps = engine.stats().steps
    stream = await front.run(engine, UNSEEN, params(max_tokens=1))
    assert len(stream.tokens) == 1
    assert engine.stats().steps - steps >= -(-len(UNSEEN) // 8)


@pytest.mark.parametrize("ranks", [0, 3])
async def test_an_order_with_a_mistake_costs_its_order_alone(
    engine: VllmEngine, front: Front, ranks: int
) -> None:
    sampling = params(max_tokens=20, temperature=1.0, seed=4)
    reference = await front.run(engine, ANSWERING, sampling)
    order = Mistaken()
    order.ranks = ranks
    await serve_by(engine, GuardedOrder("mine", order, log_mistake))
    streams = [front.stream(ANSWERING, sampling) for _ in range(4)]
    submit_together(engine, front, streams)
    await front.until(lambda: all(stream.finished for stream in streams))
    assert all(stream.tokens == reference.tokens for stream in streams)
    assert engine.stats().order_mistake.startswith("rank: ZeroDivisionError")


async def test_order_can_change_under_load(engine: VllmEngine, front: Front) -> None:
    """Every order after every other, with requests in all states: all answers are unchanged."""
    sampling = params(max_tokens=60, temperature=1.0, seed=3)
    reference = await front.run(engine, ANSWERING, sampling)
    streams = [front.stream(ANSWERING, sampling) for _ in range(6)]
    submit_together(engine, front, streams)
    orders = ["pascal", "vllm", "round_robin", "decode_first", "fcfs", "vllm", "pascal", "fcfs"]
    for number, name in enumerate(orders):
        engine.set_intra(name)
        await front.until(lambda: sum(map(len, (s.tokens for s in streams))) >= 15 * (number + 1))  # noqa: B023
    await front.until(lambda: all(stream.finished for stream in streams))
    assert all(stream.tokens == reference.tokens for stream in streams)
    with pytest.raises(UnknownIntraError):
        engine.set_intra("nonsense")


async def test_invalid_grammar_ends_only_its_request(engine: VllmEngine, front: Front) -> None:
    await serve_by(engine, PascalQueue())
    outputs = StructuredOutputsParams(grammar="root ::= nothing_of_that_name")
    outputs._backend = "xgrammar"
    broken = front.stream(ANSWERING, params(structured_outputs=outputs))
    good = front.stream(ANSWERING, params(max_tokens=20))
    submit_together(engine, front, [broken, good])
    await front.until(lambda: broken.finished and good.finished)
    assert broken.finish_reason == FinishReason.ERROR
    assert len(good.tokens) == 20


async def test_grammar_that_is_never_compiled_ends_only_its_request(
    engine: VllmEngine, front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    await serve_by(engine, PascalQueue())
    outputs = StructuredOutputsParams(grammar='root ::= "a"')
    outputs._backend = "xgrammar"
    manager = engine._parts.core.core.structured_output_manager
    begun, late, go_on = threading.Event(), threading.Event(), threading.Event()

    def compile_for_ever(request: Request) -> None:
        begun.set()
        go_on.wait(WAIT_S)

    def now_s() -> float:
        return time.monotonic() + (2 * WAIT_S if late.is_set() else 0.0)

    with ThreadPoolExecutor(1) as compiling:
        monkeypatch.setattr(requests, "_DEADLINE_S", WAIT_S)
        monkeypatch.setattr(requests, "time", SimpleNamespace(monotonic=now_s))
        monkeypatch.setattr(manager, "executor", compiling)
        monkeypatch.setattr(manager, "_create_grammar", compile_for_ever)
        try:
            first, second = (front.stream(ANSWERING, params(structured_outputs=outputs)) for _ in range(2))
            good = front.stream(ANSWERING, params(max_tokens=20))
            submit_together(engine, front, [first, second, good])
            await front.until_tokens(good, 1)
            assert await asyncio.to_thread(begun.wait, WAIT_S)
            # Both wait by now, one of them for a thread.
            late.set()
            await front.until(lambda: first.finished and second.finished and good.finished)
        finally:
            go_on.set()
    # The second one had no thread, and may be tried elsewhere.
    assert isinstance(first.refusal, Unrunnable)
    assert type(second.refusal) is EngineRefusal
    assert len(good.tokens) == 20


# ---- the queue


def queued(lengths: list[int]) -> tuple[RankedQueue, list[Request]]:
    requests = [
        Request(f"r{n}", [1] * length, SamplingParams(max_tokens=1), None) for n, length in enumerate(lengths)
    ]
    policy = ByLength()
    arrivals = {request: number for number, request in enumerate(requests)}

    def rank(request: Request) -> Rank:
        return policy.rank(JobView(arrivals[request], Phase.PREFILL, request.num_prompt_tokens, 0, 0))

    return RankedQueue(rank, lambda request: None, lambda request: None, requests[:2]), requests


async def test_queue_is_ordered_by_rank_and_yields_only_admitted_requests() -> None:
    queue, (a, b, c, d) = queued([5, 3, 4, 3])
    queue.add_request(c)
    queue.prepend_request(d)
    assert list(queue) == [b, d, c, a]
    assert (len(queue), queue.peek_request()) == (4, b)
    queue.open([c, a])
    assert queue and len(queue) == 4
    assert queue.pop_request() is c
    assert queue.peek_request() is a
    # Skipped by the scan and put back.
    queue.pop_request()
    assert not queue
    queue.prepend_requests([a])
    assert not queue
    queue.close()
    assert list(queue) == [b, d, a]
    queue.remove_requests([d, c])
    assert list(queue) == [b, a]
    queue.remove_request(b)
    queue.remove_request(a)
    assert not queue and not len(queue)
