"""vLLM's engine client with what a fleet behind it needs: trace context, and refusals with a status of
their own."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable
from copy import copy
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar

from vllm.config import ObservabilityConfig
from vllm.exceptions import GracefulHTTPError
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from frontend_svc.admission import NO_INSTANCE, TOO_MANY_REQUESTS, AdmissionReader, AdmissionState, Refusal
from frontend_svc.answers.calls import ANSWER_HEADER
from frontend_svc.api_server.kept_answers import Call, call_of_task
from frontend_svc.api_server.tenants import TenantAdmission, Tenants, tenant_of_call
from tailrace.tenancy.book import Tenant
from tailrace.tenancy.share import SHARE_HEADER, Share


class Refused(GracefulHTTPError):  # type: ignore[misc]
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
    # Whether `frontend_svc` is told whose a request is.
    tells_tenants: ClassVar[bool] = False
    observability_config: ObservabilityConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Every request passes here with the queue that its outputs will come by.
        self.output_processor.add_request = _unmerging(self.output_processor.add_request)
        self.observability_config = copy(self.observability_config)
        self.observability_config.otlp_traces_endpoint = "tailrace"

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Refuse before a response is started. Raises Refused, or what vLLM's own limits raise."""
        match self.admission.read():
            case AdmissionState.NO_INSTANCE:
                raise Refused(NO_INSTANCE)
            case AdmissionState.FULL:
                raise Refused(TOO_MANY_REQUESTS)
        super().check_admission(n, request_id)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's stream, as the tenant whose request it is may have it. A prompt that is too long for the
        tenant is refused here, before a response is started. Raises Refused."""
        call = call_of_task.get()
        if call is not None:
            kwargs["trace_headers"] = {**(kwargs.get("trace_headers") or {}), ANSWER_HEADER: call.name}
        tenant, tenants = tenant_of_call.get(), TenantAdmission.tenants
        if tenant is None or tenants is None:
            return self._generate(prompt, sampling_params, request_id, kwargs)
        length = _prompt_tokens(prompt)
        if tenant.longest_prompt and length > tenant.longest_prompt:
            raise Refused(
                Refusal(400, f"This key may send {tenant.longest_prompt} tokens in a prompt, not {length}.")
            )
        self._mark(kwargs, tenant)
        outputs = self._generate(prompt, sampling_params, request_id, kwargs)
        delta = sampling_params.output_kind is RequestOutputKind.DELTA
        if call is not None and call.opened.run > 1:
            # Charged in the first run.
            length = 0
        return _charged(outputs, delta, length, partial(_charge, tenants, tenant, call))

    def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[PoolingRequestOutput, None]:
        """vLLM's pooling, as the tenant whose request it is may have it."""
        tenant = tenant_of_call.get()
        if tenant is not None:
            self._mark(kwargs, tenant)
        outputs: AsyncGenerator[PoolingRequestOutput, None] = super().encode(*args, **kwargs)
        return outputs

    def _mark(self, further: dict[str, Any], tenant: Tenant) -> None:
        """What is not for the client to say."""
        further["priority"] = tenant.priority
        if self.tells_tenants:
            share = Share(tenant.name, tenant.weight).encode()
            further["trace_headers"] = {**(further.get("trace_headers") or {}), SHARE_HEADER: share}

    async def _generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, further: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        """A request that `frontend_svc` refuses ends with the status that it gives."""
        outputs = super().generate(prompt, sampling_params, request_id, **further)
        call = call_of_task.get()
        try:
            async for output in outputs:
                if call is not None:
                    call.tokens += sum(len(each.token_ids) for each in output.outputs)
                # Of several answers (n > 1) one may end so while the others go on.
                for each in output.outputs:
                    if each.finish_reason is None:
                        continue
                    if (refusal := Refusal.decode(each.stop_reason)) is not None:
                        raise Refused(refusal)
                yield output
        finally:
            await outputs.aclose()


class UnmergedOutputs(RequestOutputCollector):  # type: ignore[misc]
    """Hands a request's outputs over one by one, as they came.

    vLLM merges those that its API server has not taken yet, so how an answer is divided into events depends
    on how busy the process is. An answer that is run again must be divided as it was.
    """

    waiting: deque[RequestOutput]

    def put(self, output: RequestOutput | PoolingRequestOutput | Exception) -> None:
        """See RequestOutputCollector."""
        if isinstance(output, RequestOutput) and not isinstance(self.output, Exception):
            self.waiting.append(output)
            self.ready.set()
        else:
            super().put(output)

    async def get(self) -> RequestOutput | PoolingRequestOutput:
        """See RequestOutputCollector."""
        while (output := self.get_nowait()) is None:
            await self.ready.wait()
        return output

    def get_nowait(self) -> RequestOutput | PoolingRequestOutput | None:
        """See RequestOutputCollector."""
        if self.waiting:
            return self.waiting.popleft()
        output: RequestOutput | PoolingRequestOutput | None = super().get_nowait()
        self.ready.clear()
        return output


def _unmerging(add_request: Callable[..., None]) -> Callable[..., None]:
    """OutputProcessor.add_request; the queue of a request whose answer is kept does not merge."""

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


async def _charged(
    outputs: AsyncGenerator[RequestOutput, None],
    delta: bool,
    prompt_tokens: int,
    charge: Callable[[int], None],
) -> AsyncGenerator[RequestOutput, None]:
    """The same; in the end the tokens of prompt and answers are charged, whoever ended it. Of a request that
    was refused nothing was computed."""
    made = 0
    try:
        async for output in outputs:
            now = sum(len(each.token_ids) for each in output.outputs)
            made = made + now if delta else now
            yield output
    except Refused:
        if not made:
            prompt_tokens = 0
        raise
    finally:
        charge(prompt_tokens + made)
        await outputs.aclose()


def _charge(tenants: Tenants, tenant: Tenant, call: Call | None, tokens: int) -> None:
    if call is not None:
        told_before = min(tokens, call.told_before)
        call.told_before -= told_before
        tokens -= told_before
    tenants.meter.charge(tenant, tokens, tenants.now_s())


def _prompt_tokens(prompt: Any) -> int:
    """Of what vLLM's own API hands over; 0 where it is not tokens."""
    ids = (
        prompt.get("prompt_token_ids")
        if isinstance(prompt, dict)
        else getattr(prompt, "prompt_token_ids", None)
    )
    return 0 if ids is None else len(ids)
