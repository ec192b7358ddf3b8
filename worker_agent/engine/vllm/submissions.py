"""Admit requests from front ends: new ones, and ones that continue after the loss of their instance."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from vllm.sampling_params import SamplingType
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request, RequestStatus

from worker_agent.engine.base import Held, RequestKey, StepColumns, Submission
from worker_agent.engine.errors import EngineRefusal, Unrunnable
from worker_agent.engine.turns import remaining_prefill_s
from worker_agent.engine.vllm.imports import VllmImports
from worker_agent.engine.vllm.load import LoadedCore
from worker_agent.engine.vllm.outputs import OutputWriter
from worker_agent.engine.vllm.phases import PhaseTracker
from worker_agent.engine.vllm.requests import GrammarInvalid, Pace, VllmRequest, VllmRequests

_log = logging.getLogger(__name__)


class Submissions:
    """Submissions and aborts. Engine thread only."""

    def __init__(
        self,
        core: LoadedCore,
        table: VllmRequests,
        imports: VllmImports,
        writer: OutputWriter,
        deliver: Callable[[list[StepColumns]], None],
    ) -> None:
        self._core = core
        self._table = table
        self._imports = imports
        self._writer = writer
        self._deliver = deliver

    def submit(self, submission: Submission) -> None:
        """Admit a request; one that cannot run gets a FAILED output."""
        try:
            self._submit(submission)
        # No message may end the engine, whatever vLLM's decoder or constructors raise.
        except Exception as error:  # noqa: BLE001
            self._fail(submission, error)

    def abort(self, keys: Sequence[RequestKey]) -> None:
        """Free these requests, whether running, paused, waiting or being imported."""
        for key in keys:
            entry = self._table.by_key(key)
            if entry is not None:
                self._remove(entry)
            self._imports.drop_key(key)

    def abort_client(self, client: int) -> None:
        """Free all requests of a front end."""
        for entry in self._table:
            if entry.key.client == client:
                self._remove(entry)
        self._imports.drop_client(client)

    def find_held(self, keys: Sequence[RequestKey]) -> dict[RequestKey, Held]:
        """Return the state of those of these requests that the engine has, running or waiting."""
        paused = self._core.scheduler.paused
        entries = {key: self._table.by_key(key) for key in keys}
        return {
            key: Held(entry.epoch, entry.request_id in paused)
            for key, entry in entries.items()
            if entry is not None
        }

    # ---- internals

    def _submit(self, submission: Submission) -> None:
        earlier = self._table.get(submission.request_id)
        if earlier is not None:
            if earlier.epoch >= submission.epoch:
                _log.warning("request %s came twice, epoch %d", submission.request_id, submission.epoch)
                return
            self._remove(earlier)
        self._core.drain(submission.request_id)
        self._imports.drop(submission.request_id)
        request = self._core.decode(submission.frames, submission.key.client, submission.adapter_version)
        if request.request_id != submission.request_id:
            raise EngineRefusal(f"its message is that of request {request.request_id}")
        outputs = list(submission.output_token_ids)
        if self._core.pooling and outputs:
            raise Unrunnable("a pooling model cannot continue an output")
        if request.num_tokens + len(outputs) > self._core.max_model_len:
            raise Unrunnable(f"{len(outputs)} output tokens are more than fit max_model_len")
        phases = PhaseTracker(self._core.marks, request.prompt_token_ids or ())
        phases.replay(outputs)
        phases.back_to_prefill()
        turn = self._table.new_turn(request, self._queue_s())
        if submission.answer_tokens:
            turn.start_answering(time.time(), submission.answering_s)
        entry = VllmRequest(
            key=submission.key,
            request_id=request.request_id,
            epoch=submission.epoch,
            frames=submission.frames,
            adapter_version=self._core.adapters.version_of(request.lora_request),
            frontend_id=submission.frontend_id,
            traceparent=submission.traceparent,
            request=request,
            phases=phases,
            pace=Pace(),
            emitted=len(outputs),
            turn=turn,
        )
        self._core.start_grammar(request)
        self._table.add(entry)
        if not outputs:
            self._start_new(request)

        def on_grammar(refusal: EngineRefusal | None) -> None:
            if self._table.get(request.request_id) is not entry:
                return
            if not outputs and (refusal is None or isinstance(refusal, GrammarInvalid)):
                # vLLM starts or ends it itself; only a grammar that is never ready it waits for without end.
                return
            try:
                if refusal is not None:
                    raise refusal
                self._resume(entry, outputs, submission.sampling_state)
            except Exception as error:  # noqa: BLE001 - as in submit
                self._fail(submission, error)

        self._core.grammars.when_ready(request, on_grammar)

    def _start_new(self, request: Request) -> None:
        if self._core.ranks[0].device_type == "cpu" and self._core.keeps_states and _is_seeded(request):
            # vLLM's CPU generators cannot take back the draws of a prompt computed in several steps (see
            # sampling.SeededCpuGenerator): adopt the request, which gives it one that can.
            self._core.adopt(request, b"")
            if request.status == RequestStatus.WAITING:
                request.status = RequestStatus.PREEMPTED
        self._core.core.add_request(request)

    def _resume(self, entry: VllmRequest, outputs: list[int], generator_state: bytes) -> None:
        request = entry.request
        self._core.append_outputs(request, outputs)
        if check_stop(request, self._core.max_model_len):
            # The front end received the last token but not the end of the stream.
            self._table.remove(entry)
            output = EngineCoreOutput(
                request.request_id,
                [],
                finish_reason=request.get_finished_reason(),
                stop_reason=request.stop_reason,
            )
            self._deliver([self._writer.ended(entry.key, entry.epoch, entry.emitted, output)])
            return
        request.status = RequestStatus.PREEMPTED
        self._core.adopt(request, generator_state)
        self._core.core.add_request(request)

    def _queue_s(self) -> float:
        """Return the prefill ahead of a prompt that arrives now (JobView.queue_s); swapped-out requests need
        none."""
        return sum(
            remaining_prefill_s(entry.request.num_tokens, entry.request.num_computed_tokens)
            for entry in self._table
            if self._core.host.get(entry.request_id) is None
        )

    def _remove(self, entry: VllmRequest) -> None:
        self._table.remove(entry)
        self._core.finish([entry.request_id])

    def _fail(self, submission: Submission, error: Exception) -> None:
        entry = self._table.by_key(submission.key)
        if entry is not None and entry.epoch == submission.epoch:
            self._remove(entry)
        first_index = len(submission.output_token_ids)
        self._deliver(
            [
                self._writer.failed(
                    submission.key,
                    submission.request_id,
                    submission.epoch,
                    first_index,
                    _refusal(submission, error),
                )
            ]
        )


def _refusal(submission: Submission, error: Exception) -> EngineRefusal:
    """Return why a request was not run, in words for its client."""
    if isinstance(error, EngineRefusal):
        return error
    _log.error("request %s was not run", submission.request_id, exc_info=error)
    if isinstance(error, ValueError | TypeError):
        # So vLLM rejects what a request asks for, or the message is none: other engines would do the same.
        return Unrunnable(str(error))
    return EngineRefusal("the engine failed to admit it")


def _is_seeded(request: Request) -> bool:
    params = request.sampling_params
    return params is not None and bool(params.sampling_type == SamplingType.RANDOM_SEED)
