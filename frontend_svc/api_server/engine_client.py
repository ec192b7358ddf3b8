"""vLLM's engine client, extended for a fleet: trace context, tenants, kept answers, and refusals with HTTP
statuses."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable
from copy import copy
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar, Final

from vllm.config import ObservabilityConfig
from vllm.exceptions import GracefulHTTPError
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from frontend_svc.admission import NO_INSTANCE, TOO_MANY_REQUESTS, AdmissionReader, AdmissionState, Refusal
from frontend_svc.answers.calls import ANSWER_HEADER
from frontend_svc.api_server.kept_answers import Call, call_of_task
from frontend_svc.api_server.tenants import TenantAdmission, Tenants, tenant_of_call
from tailrace.tenancy.keys import Tenant
from tailrace.tenancy.share import SHARE_HEADER, Share

# Looked up for every token.
_ERROR: Final = FinishReason.ERROR


class RequestRefused(GracefulHTTPError):  # type: ignore[misc]
    """The request ends without an answer, for a reason that `frontend_svc` gives."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message, HTTPStatus(refusal.status))


class FleetClient(AsyncLLM):  # type: ignore[misc]
    """AsyncLLM over `frontend_svc`.

    vLLM drops a client's `traceparent` unless it exports spans itself. The check is on the client's
    observability settings, read at each request; the exporter and the output processor have read theirs
    when they were built, so changing this client's copy afterwards lets the headers through to the engine
    core and starts no exporter.
    """

    admission: AdmissionReader
    # Whether requests carry their tenant to `frontend_svc`.
    sends_tenants: ClassVar[bool] = False
    observability_config: ObservabilityConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Every request passes through add_request together with the queue for its outputs.
        self.output_processor.add_request = _without_merging(self.output_processor.add_request)
        _raise_refusals(self.output_processor)
        self.observability_config = copy(self.observability_config)
        self.observability_config.otlp_traces_endpoint = "tailrace"

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Refuse a request before its response starts. Raise RequestRefused, or what vLLM's own limits
        raise."""
        match self.admission.read():
            case AdmissionState.NO_INSTANCE:
                raise RequestRefused(NO_INSTANCE)
            case AdmissionState.FULL:
                raise RequestRefused(TOO_MANY_REQUESTS)
        super().check_admission(n, request_id)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Return vLLM's output stream, subject to the limits of the request's tenant.

        A prompt that is too long for the tenant is refused here, before the response starts. Raise
        RequestRefused.
        """
        call = call_of_task.get()
        if call is not None:
            kwargs["trace_headers"] = {**(kwargs.get("trace_headers") or {}), ANSWER_HEADER: call.name}
        tenant, tenants = tenant_of_call.get(), TenantAdmission.tenants
        if tenant is None or tenants is None:
            return self._generate(prompt, sampling_params, request_id, kwargs)
        length = _prompt_tokens(prompt)
        if tenant.longest_prompt and length > tenant.longest_prompt:
            raise RequestRefused(
                Refusal(400, f"This key allows prompts of {tenant.longest_prompt} tokens, not {length}.")
            )
        self._add_tenant_fields(kwargs, tenant)
        outputs = self._generate(prompt, sampling_params, request_id, kwargs)
        delta = sampling_params.output_kind is RequestOutputKind.DELTA
        if call is not None and call.opened.run > 1:
            # The prompt was charged in the first run.
            length = 0
        return _charged(outputs, delta, length, partial(_charge, tenants, tenant, call))

    def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Return vLLM's pooling outputs, with the fields of the request's tenant."""
        tenant = tenant_of_call.get()
        if tenant is not None:
            self._add_tenant_fields(kwargs, tenant)
        outputs: AsyncGenerator[PoolingRequestOutput, None] = super().encode(*args, **kwargs)
        return outputs

    def _add_tenant_fields(self, arguments: dict[str, Any], tenant: Tenant) -> None:
        """Set what the client must not choose itself: priority, and the tenant's share."""
        arguments["priority"] = tenant.priority
        if self.sends_tenants:
            share = Share(tenant.name, tenant.weight).encode()
            arguments["trace_headers"] = {**(arguments.get("trace_headers") or {}), SHARE_HEADER: share}

    def _generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, arguments: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Return vLLM's outputs; a request that `frontend_svc` refuses raises RequestRefused with its
        status."""
        outputs: AsyncGenerator[RequestOutput, None] = super().generate(
            prompt, sampling_params, request_id, **arguments
        )
        call = call_of_task.get()
        if call is None and sampling_params.n == 1:
            # The refusal is raised in vLLM's generator (_raise_refusals): one around it would be resumed for
            # every token.
            return outputs
        return _checked(outputs, call)


class UnmergedOutputs(RequestOutputCollector):  # type: ignore[misc]
    """Pass a request's outputs on one by one, as they arrive.

    vLLM merges outputs that its API server has not consumed yet, so how an answer is split into events
    depends on how busy the process is. An answer that is run again must be split as before.
    """

    waiting: deque[RequestOutput]

    def put(self, output: RequestOutput | PoolingRequestOutput | Exception) -> None:
        """Queue an output; see RequestOutputCollector."""
        if isinstance(output, RequestOutput) and not isinstance(self.output, Exception):
            self.waiting.append(output)
            self.ready.set()
        else:
            super().put(output)

    async def get(self) -> RequestOutput | PoolingRequestOutput:
        """Wait for the next output; see RequestOutputCollector."""
        while (output := self.get_nowait()) is None:
            await self.ready.wait()
        return output

    def get_nowait(self) -> RequestOutput | PoolingRequestOutput | None:
        """Return the next output, or None; see RequestOutputCollector."""
        if self.waiting:
            return self.waiting.popleft()
        output: RequestOutput | PoolingRequestOutput | None = super().get_nowait()
        self.ready.clear()
        return output


def _without_merging(add_request: Callable[..., None]) -> Callable[..., None]:
    """Wrap OutputProcessor.add_request so that the queue of a kept answer does not merge outputs."""

    def add(
        request: EngineCoreRequest,
        prompt: str | None,
        parent: ParentRequest | None = None,
        index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        if queue is not None and call_of_task.get() is not None and not isinstance(queue, UnmergedOutputs):
            queue.__class__ = UnmergedOutputs
            queue.waiting = deque()
        add_request(request, prompt, parent, index, queue)

    return add


def _raise_refusals(processor: OutputProcessor) -> None:
    """Have refusals of requests for one answer raised as RequestRefused by their queues.

    With n > 1, vLLM's generator would not abort the other answers: see `_checked`.
    """
    process_outputs = processor.process_outputs

    def process(
        outputs: list[EngineCoreOutput], *arguments: Any, **named_arguments: Any
    ) -> OutputProcessorOutput:
        for output in outputs:
            if output.finish_reason is _ERROR and (refusal := Refusal.decode(output.stop_reason)) is not None:
                state = processor.request_states.get(output.request_id)
                if state is not None and state.parent_req is None and state.queue is not None:
                    # The queue drops the output that follows.
                    state.queue.put(RequestRefused(refusal))
        return process_outputs(outputs, *arguments, **named_arguments)

    processor.process_outputs = process


def _refusal_in(output: RequestOutput) -> RequestRefused | None:
    """Return the refusal of one of the output's answers, if there is one."""
    for completion in output.outputs:
        if (
            completion.finish_reason == str(_ERROR)
            and (refusal := Refusal.decode(completion.stop_reason)) is not None
        ):
            return RequestRefused(refusal)
    return None


async def _checked(
    outputs: AsyncGenerator[RequestOutput, None], call: Call | None
) -> AsyncGenerator[RequestOutput, None]:
    """Yield the outputs and count their tokens for a kept answer; raise RequestRefused if one is refused.

    With n > 1, one answer may be refused while the others continue.
    """
    try:
        async for output in outputs:
            if call is not None:
                call.tokens += sum(len(completion.token_ids) for completion in output.outputs)
            if (refused := _refusal_in(output)) is not None:
                raise refused
            yield output
    finally:
        await outputs.aclose()


async def _charged(
    outputs: AsyncGenerator[RequestOutput, None],
    delta: bool,
    prompt_tokens: int,
    charge: Callable[[int], None],
) -> AsyncGenerator[RequestOutput, None]:
    """Yield the outputs; at the end charge the tokens of prompt and answers, however the request ended.

    A refused request is not charged for its prompt: nothing was computed.
    """
    generated = 0
    try:
        async for output in outputs:
            new_tokens = sum(len(completion.token_ids) for completion in output.outputs)
            generated = generated + new_tokens if delta else new_tokens
            yield output
    except RequestRefused:
        if not generated:
            prompt_tokens = 0
        raise
    finally:
        charge(prompt_tokens + generated)
        await outputs.aclose()


def _charge(tenants: Tenants, tenant: Tenant, call: Call | None, tokens: int) -> None:
    if call is not None:
        replayed_tokens = min(tokens, call.replayed_tokens)
        call.replayed_tokens -= replayed_tokens
        tokens -= replayed_tokens
    tenants.meter.charge(tenant, tokens, tenants.now_s())


def _prompt_tokens(prompt: Any) -> int:
    """Return the prompt's number of tokens; 0 if it does not consist of tokens."""
    ids = (
        prompt.get("prompt_token_ids")
        if isinstance(prompt, dict)
        else getattr(prompt, "prompt_token_ids", None)
    )
    return 0 if ids is None else len(ids)
