"""Outputs of the simulated engine, processed by vLLM's API server (decoder, detokenizer and metrics)."""

from __future__ import annotations

import msgspec
import pytest

from tailrace.tiny import MODEL_PATH
from tests.worker.simulated import END_THINK, EOS, SMALL, VirtualClock, now
from worker_agent.engine.base import Frames, RequestKey, StepColumns, Submission
from worker_agent.engine.simulated import SimulatedEngine

pytestmark = pytest.mark.vllm

PROMPT = list(b"How long is a piece of string?")


class _RecordingSink:
    def __init__(self) -> None:
        self.frames: list[list[bytes]] = []

    def on_step(self, columns: StepColumns) -> None:
        self.frames.append(columns.frames)

    def on_utility(self, client: int, call_id: int, frames: Frames) -> None:
        self.frames.append(list(frames))

    def on_engine_dead(self, reason: str) -> None:
        raise AssertionError(reason)


@pytest.mark.parametrize("logprobs", [None, 0, 2, 20])
def test_vllms_api_server_decodes_the_outputs(logprobs: int | None) -> None:
    engine_module = pytest.importorskip("vllm.v1.engine")
    from transformers import AutoTokenizer
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.metrics.stats import IterationStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    sampling = SamplingParams(
        max_tokens=60, logprobs=logprobs, seed=5, output_kind=RequestOutputKind.FINAL_ONLY
    )
    sampling._eos_token_id = EOS
    request = engine_module.EngineCoreRequest(
        "chatcmpl-1", PROMPT, None, sampling, None, 12.5, None, None, None, external_req_id="mine"
    )
    tokenizer = AutoTokenizer.from_pretrained(str(MODEL_PATH))
    processor = OutputProcessor(tokenizer, log_stats=True)
    processor.add_request(request, "How long is a piece of string?")

    clock, kept = VirtualClock(), _RecordingSink()
    engine = SimulatedEngine(msgspec.structs.replace(SMALL, max_model_len=96), clock=clock)
    now(engine.start(kept))
    frames = [bytes(frame) for frame in MsgpackEncoder().encode(request)]
    engine.submit(Submission(RequestKey(0, 1), request.request_id, 0, frames))
    clock.drain()

    decoder = MsgpackDecoder(engine_module.EngineCoreOutputs)
    finished = []
    prompt_tokens = 0
    for message in kept.frames:
        outputs = decoder.decode(message)
        statistics = IterationStats()
        done = processor.process_outputs(outputs.outputs, outputs.timestamp, statistics)
        finished += done.request_outputs
        prompt_tokens += statistics.prompt_token_stats.total
        for request_statistics in statistics.finished_requests:
            assert 0 <= request_statistics.queued_time <= request_statistics.e2e_latency
            assert 0 <= request_statistics.prefill_time < 60
    assert prompt_tokens == len(PROMPT)
    (output,) = finished
    (completion,) = output.outputs
    assert output.request_id == "mine"
    assert completion.finish_reason == "stop"
    tokens = list(completion.token_ids)
    assert tokens[-1] == EOS
    thought, answer = completion.text.split("</think>")
    assert thought.startswith("<think>")
    assert answer.isascii()
    assert len(answer) == len(tokens) - tokens.index(END_THINK) - 2
    if logprobs is None:
        assert completion.logprobs is None
    else:
        assert len(completion.logprobs) == len(tokens)
        for token, entries in zip(tokens, completion.logprobs, strict=True):
            assert entries[token].rank == 1
            assert len(entries) == max(1, logprobs)
