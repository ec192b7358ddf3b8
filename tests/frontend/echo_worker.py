"""A scripted worker that answers every request, in the tiny model's tokens (bytes)."""

from __future__ import annotations

import asyncio

from experiments.tiny.tokens import END_THINK, IM_END, THINK
from tailrace.v1 import worker_pb2
from tailrace.wire.outputs import NIL, EngineCoreOutput, FinishReason, encode_outputs
from tailrace.wire.requests import EngineCoreRequest, read_full_request
from tests.frontend.scripted_worker import FINISHED, PREFILL_DONE, REASONING_ENDED, ScriptedWorker, outputs

THOUGHT = "let me see"
ANSWER = "the answer"


# The same for every prompt.
SCRIPT = [THINK, *THOUGHT.encode(), END_THINK, *ANSWER.encode(), IM_END]


class EchoWorker(ScriptedWorker):
    """Worker that answers every request at once, one token per step, up to max_tokens.

    A request with min_tokens gets half of the thought and then nothing: it stays open until it is aborted.
    """

    def __init__(self, instance_id: str) -> None:
        super().__init__(instance_id)
        self.requests: list[EngineCoreRequest] = []
        self.submits: list[worker_pb2.Submit] = []
        # What every output says of times and of the prompt.
        self.events = self.prefill_stats = NIL

    async def on_submit(self, submit: worker_pb2.Submit) -> None:
        """Send the answer, one step per token."""
        request = read_full_request(list(submit.frames))
        self.requests.append(request)
        self.submits.append(submit)
        assert request.sampling_params is not None
        if request.sampling_params.min_tokens > 0:
            self.send(outputs(submit, [THINK, *THOUGHT[:5].encode()], 0, PREFILL_DONE))
            return
        tokens = SCRIPT[: request.sampling_params.max_tokens]
        for index in range(len(submit.output_token_ids), len(tokens)):
            last = index == len(tokens) - 1
            flags = PREFILL_DONE * (index == 0) | FINISHED * last
            if tokens[index] == END_THINK:
                flags |= REASONING_ENDED
            reason = FinishReason.STOP if tokens[index] == IM_END else FinishReason.LENGTH
            output = EngineCoreOutput(
                submit.request_id,
                [tokens[index]],
                finish_reason=reason if last else None,
                events=self.events,
                prefill_stats=self.prefill_stats,
            )
            step = worker_pb2.StepOutputs(
                frames=encode_outputs([output]),
                handles=[submit.handle],
                epochs=[submit.epoch],
                first_indices=[index],
                counts=[1],
                token_ids=[tokens[index]],
                flags=[flags],
            )
            self.send(worker_pb2.AttachDown(outputs=step))
            await asyncio.sleep(0)
