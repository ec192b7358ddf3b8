"""A refusal by `frontend_svc` is raised to vLLM's API layer, for one answer and for several."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from frontend_svc.admission import OVERLOADED, Refusal
from tailrace.tenancy.keys import Tenant
from tailrace.tiny import MODEL_PATH

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

pytestmark = pytest.mark.vllm


class Answers:
    """vLLM's output processor as FleetClient uses it, with requests for streamed answers."""

    def __init__(self) -> None:
        from vllm.tokenizers import get_tokenizer
        from vllm.v1.engine.output_processor import OutputProcessor

        from frontend_svc.api_server.engine_client import _prepare_outputs

        self.processor: OutputProcessor = OutputProcessor(get_tokenizer(str(MODEL_PATH)), log_stats=False)
        _prepare_outputs(self.processor)

    def ask_to_embed(self) -> RequestOutputCollector:
        """Add a request for an embedding, "e0", and return its queue."""
        from vllm.pooling_params import PoolingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.output_processor import RequestOutputCollector

        queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "e")
        request = EngineCoreRequest(
            request_id="e0",
            external_req_id="e",
            prompt_token_ids=[72],
            mm_features=None,
            sampling_params=None,
            pooling_params=PoolingParams(task="embed"),
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.processor.add_request(request, "H", None, 0, queue)
        return queue

    def ask(self, n: int = 1) -> RequestOutputCollector:
        """Add a request for `n` answers, "r0" and so on, and return its queue."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.output_processor import RequestOutputCollector
        from vllm.v1.engine.parallel_sampling import ParentRequest

        queue = RequestOutputCollector(RequestOutputKind.DELTA, "r")
        params = SamplingParams(n=n, output_kind=RequestOutputKind.DELTA)

        def request(name: str) -> EngineCoreRequest:
            return EngineCoreRequest(
                request_id=name,
                external_req_id="r",
                prompt_token_ids=[72],
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )

        parent = None if n == 1 else ParentRequest(request("r"))
        for index in range(n):
            if parent is not None:
                parent.child_requests.add(f"r{index}")
            self.processor.add_request(request(f"r{index}"), "H", parent, index, queue)
        return queue

    def step(self, *outputs: EngineCoreOutput) -> None:
        """Process one message of the engine core."""
        assert not self.processor.process_outputs(list(outputs), time.monotonic(), None).request_outputs


def token(request_id: str = "r0") -> EngineCoreOutput:
    from vllm.v1.engine import EngineCoreOutput

    return EngineCoreOutput(request_id, [ord("a")])


def end(
    request_id: str = "r0", reason: FinishReason | None = None, stop_reason: str | None = None
) -> EngineCoreOutput:
    """Return the end of an answer; by default a refusal."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    if reason is None:
        reason, stop_reason = FinishReason.ERROR, OVERLOADED.encode()
    return EngineCoreOutput(request_id, [], finish_reason=reason, stop_reason=stop_reason)


def test_refusal_of_a_single_answer_is_raised_by_its_queue() -> None:
    from frontend_svc.api_server.engine_client import RequestRefused

    async def refused() -> RequestRefused:
        answers = Answers()
        queue = answers.ask()
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        answers.step(end())
        with pytest.raises(RequestRefused) as error:
            await waiting
        assert not answers.processor.has_unfinished_requests()
        return error.value

    error = asyncio.run(refused())
    assert (error.http_status, str(error)) == (OVERLOADED.status, OVERLOADED.message)


def test_refusal_replaces_a_token_that_was_not_consumed() -> None:
    from frontend_svc.api_server.engine_client import RequestRefused

    async def check() -> None:
        answers = Answers()
        queue = answers.ask()
        answers.step(token())
        answers.step(end())
        with pytest.raises(RequestRefused):
            queue.get_nowait()
        assert queue.get_nowait() is None

    asyncio.run(check())


@pytest.mark.parametrize("refusal", [OVERLOADED, None])
def test_embedding_that_ends_without_a_result_ends_alone(refusal: Refusal | None) -> None:
    from frontend_svc.api_server.engine_client import RequestRefused

    async def check() -> None:
        from vllm.v1.engine import FinishReason

        answers = Answers()
        queue, other = answers.ask_to_embed(), answers.ask(n=2)
        stop_reason = None if refusal is None else refusal.encode()
        answers.step(end("e0", FinishReason.ERROR, stop_reason), token("r1"))
        with pytest.raises(RequestRefused) as error:
            await queue.get()
        assert error.value.http_status == (500 if refusal is None else refusal.status)
        assert other.get_nowait() is not None

    asyncio.run(check())


def test_log_probabilities_that_nobody_asked_for_are_left_out() -> None:
    async def check() -> None:
        import numpy as np
        import torch
        from vllm.v1.outputs import LogprobsLists, LogprobsTensors

        answers = Answers()
        queue = answers.ask()
        ids, values = [[7, 8]], [[-0.5, -1.0]]
        output = token()
        output.new_logprobs = LogprobsLists(np.array(ids), np.array(values), np.array([1]))
        output.new_prompt_logprobs_tensors = LogprobsTensors(
            torch.tensor(ids), torch.tensor(values), torch.tensor([1])
        )
        answers.step(output)
        shown = queue.get_nowait()
        assert shown is not None and shown.outputs[0].logprobs is None

    asyncio.run(check())


def test_other_ends_of_a_single_answer_pass_unchanged() -> None:
    from vllm.v1.engine import FinishReason

    async def check() -> None:
        for reason, stop_reason in (
            (FinishReason.LENGTH, None),
            (FinishReason.ERROR, None),
            (FinishReason.STOP, "tailrace:429:a stop string of the client"),
        ):
            answers = Answers()
            queue = answers.ask()
            answers.step(token())
            answers.step(end("r0", reason, stop_reason))
            output = queue.get_nowait()
            assert output is not None
            assert (output.finished, output.outputs[0].stop_reason) == (True, stop_reason)

    asyncio.run(check())


def test_refusal_of_an_unknown_request_is_ignored() -> None:
    async def check() -> None:
        answers = Answers()
        queue = answers.ask()
        answers.step(end("gone"), token())
        assert queue.get_nowait() is not None

    asyncio.run(check())


def test_refused_answer_among_several_closes_vllms_generator() -> None:
    from vllm.v1.engine import FinishReason

    from frontend_svc.api_server.engine_client import RequestRefused, _checked

    closed = []

    async def outputs(queue: RequestOutputCollector) -> AsyncGenerator[RequestOutput, None]:
        try:
            while True:
                yield await queue.get()
        finally:
            # Here vLLM's own aborts the other answers.
            closed.append(True)

    async def check() -> None:
        answers = Answers()
        checked: AsyncGenerator[Any, None] = _checked(outputs(answers.ask(n=2)), None)
        # A stop string of the client.
        answers.step(end("r1", FinishReason.STOP, OVERLOADED.encode()))
        assert (await anext(checked)).outputs[0].index == 1
        answers.step(end("r0"))
        with pytest.raises(RequestRefused):
            await anext(checked)

    asyncio.run(check())
    assert closed == [True]


def test_salt_goes_where_vllm_names_blocks_and_not_into_the_prompt_itself() -> None:
    """vLLM submits a rendered prompt more than once, in a beam search for one."""
    from vllm.inputs.engine import build_enc_dec_input, split_enc_dec_input, tokens_input
    from vllm.v1.engine import input_processor

    from frontend_svc.api_server.engine_client import _salted

    tenant = Tenant(name="a")
    plain = tokens_input([1, 2], prompt="ab", cache_salt="mine")
    assert _salted(plain, tenant) == {**plain, "cache_salt": tenant.cache_salt("mine")}
    assert plain["cache_salt"] == "mine"
    both = build_enc_dec_input(tokens_input([1]), tokens_input([2]), 0)
    _, decoder = split_enc_dec_input(_salted(both, tenant))
    assert decoder["cache_salt"] == tenant.cache_salt(None)
    # This is where vLLM reads it.
    assert 'cache_salt=decoder_input.get("cache_salt")' in inspect.getsource(input_processor)


def test_times_of_workers_are_put_on_this_clock_and_count_from_the_first_schedule() -> None:
    from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput
    from vllm.v1.metrics.stats import RequestStateStats

    from frontend_svc.api_server.statistics import correct_times

    state: Any = SimpleNamespace(stats=RequestStateStats())
    queued, scheduled, preempted = (
        EngineCoreEventType.QUEUED,
        EngineCoreEventType.SCHEDULED,
        EngineCoreEventType.PREEMPTED,
    )
    events = [EngineCoreEvent(queued, 100.0), EngineCoreEvent(scheduled, 101.0)]
    first = EngineCoreOutput("r", [1], events=events)
    correct_times(state, first, 102.0, 5.0)
    assert first.events is not None and [event.timestamp for event in first.events] == [3.0, 4.0]
    state.stats.scheduled_ts = 4.0
    # Another worker goes on with it, whose clock is another.
    later = EngineCoreOutput(
        "r", [2], events=[EngineCoreEvent(kind, 7000.0) for kind in (queued, scheduled, preempted)]
    )
    correct_times(state, later, 7001.0, 9.0)
    assert later.events is not None
    assert [(event.type, event.timestamp) for event in later.events] == [(preempted, 8.0)]
