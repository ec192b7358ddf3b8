"""vLLM's engine client, extended for a fleet: trace context, tenants, kept answers, and refusals with HTTP
statuses."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator
from copy import copy
from http import HTTPStatus
from typing import Any, ClassVar, Final

from vllm.config import ObservabilityConfig
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.renderers import BaseRenderer, TokenizeParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import (
    EMPTY_CPU_TENSOR,
    OutputProcessor,
    OutputProcessorOutput,
    RequestOutputCollector,
    RequestState,
)
from vllm.v1.engine.parallel_sampling import ParentRequest

from frontend_svc.admission import (
    NOT_HANDLED,
    AdmissionReader,
    Refusal,
)
from frontend_svc.answers.calls import ANSWER_HEADER
from frontend_svc.api_server.grammars import Grammars, check_elsewhere
from frontend_svc.api_server.kept_answers import Call, call_of_task
from frontend_svc.api_server.request_limits import Account, account_of_task
from frontend_svc.api_server.statistics import (
    correct_times,
    count_aborts,
    count_prefix_hits,
    count_untold_waits,
)
from tailrace.request_ids import chosen_by_client, own_id, problem_with
from tailrace.tenancy.body import LimitRefusal
from tailrace.tenancy.keys import SHARE_HEADER, Share, Tenant
from tailrace.wire.requests import pace_in

# Looked up for every token.
_ERROR: Final = FinishReason.ERROR
# A prompt that vLLM refuses once it is tokenized is charged as if so many characters were a token.
_CHARACTERS_PER_TOKEN: Final = 4


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
    # None for backends that compile grammars without this, and until the client is complete.
    grammars: Grammars | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.input_processor.assign_request_id = _assign_own_id
        # Every request passes through add_request together with the queue for its outputs.
        _watch_requests(self.output_processor)
        _prepare_outputs(self.output_processor)
        if self.logger_manager is not None:
            count_prefix_hits(self.logger_manager)
            count_untold_waits(self.output_processor)
            count_aborts(self.output_processor, self.logger_manager)
        _account_for(self.renderer)
        self._send_by_steps()
        self.grammars = check_elsewhere(self.vllm_config, self.input_processor)
        self.observability_config = copy(self.observability_config)
        self.observability_config.otlp_traces_endpoint = "tailrace"

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Refuse a request before its response starts. Raise RequestRefused, or what vLLM's own limits
        raise."""
        if (refusal := self.admission.read().refusal) is not None:
            raise RequestRefused(refusal)
        super().check_admission(n, request_id)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Return vLLM's output stream, subject to the limits of the request's tenant.

        What is wrong with the request is refused here, before the response starts. Raise RequestRefused.
        """
        _check_ids(request_id, kwargs.get("session_id"))
        if problem := pace_in(sampling_params.extra_args)[1]:
            raise RequestRefused(Refusal(400, problem))
        call = call_of_task.get()
        if call is not None:
            kwargs["trace_headers"] = {**(kwargs.get("trace_headers") or {}), ANSWER_HEADER: call.name}
        account = account_of_task.get()
        if account is None:
            return self._generate(prompt, sampling_params, request_id, kwargs)
        length, tenant = _prompt_tokens(prompt), account.tenant
        if tenant is not None:
            if tenant.longest_prompt and length > tenant.longest_prompt:
                raise RequestRefused(
                    Refusal(400, f"This key allows prompts of {tenant.longest_prompt} tokens, not {length}.")
                )
            self._add_tenant_fields(kwargs, tenant)
            prompt = _salted(prompt, tenant)
        if call is not None:
            account.replayed, account.rerun = call.opened.tokens, call.opened.run > 1
        _submit(account, sampling_params.n, length)
        return self._generate(prompt, sampling_params, request_id, kwargs)

    def encode(
        self, prompt: Any, pooling_params: PoolingParams, request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Return vLLM's pooling outputs, with the fields of the request's tenant. Raise RequestRefused."""
        _check_ids(request_id, kwargs.get("session_id"))
        account = account_of_task.get()
        if account is not None:
            if account.tenant is not None:
                self._add_tenant_fields(kwargs, account.tenant)
                prompt = _salted(prompt, account.tenant)
            _submit(account, 1, _prompt_tokens(prompt))
        outputs: AsyncGenerator[PoolingRequestOutput, None] = super().encode(
            prompt, pooling_params, request_id, *args, **kwargs
        )
        return outputs

    async def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams | PoolingParams, *args: Any, **kwargs: Any
    ) -> RequestOutputCollector:
        """Add a prompt, one of those of a large request after the other; see AsyncLLM.

        All requests with a grammar come this way, and vLLM has not compiled it yet.
        """
        account = account_of_task.get()
        if account is not None:
            await account.step()
        if isinstance(params, SamplingParams) and params.structured_outputs is not None and self.grammars:
            try:
                params = await self.grammars.checked(params, account)
            except LimitRefusal as refused:
                raise RequestRefused(Refusal(refused.status, refused.message)) from refused
        return await super().add_request(request_id, prompt, params, *args, **kwargs)

    def shutdown(self, timeout: float | None = None) -> None:
        """End what this client has started; see AsyncLLM."""
        if self.grammars is not None:
            self.grammars.close()
        super().shutdown(timeout)

    def _send_by_steps(self) -> None:
        """Send the sequences of a large request to the engine core one by one."""
        send = self.engine_core.add_request_async

        async def send_in_turn(request: EngineCoreRequest) -> None:
            account = account_of_task.get()
            if account is None:
                await send(request)
                return
            await account.step()
            await send(request)
            account.count_sent()

        self.engine_core.add_request_async = send_in_turn

    async def _add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None,
        index: int,
        queue: RequestOutputCollector,
    ) -> None:
        """Send a request to the engine core.

        vLLM's output processor has it before it is sent: what fails or is cancelled then would stay there.
        """
        try:
            await super()._add_request(request, prompt, parent_req, index, queue)
        except BaseException:
            await self.abort((parent_req or request).request_id, internal=True)
            raise

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
            # The refusal is raised in vLLM's generator (_prepare_outputs): one around it would be resumed for
            # every token.
            return outputs
        return _checked(outputs, call)


def _assign_own_id(request: EngineCoreRequest) -> None:
    """Give a request the id that everything behind the API server knows it by; see InputProcessor."""
    request.external_req_id = request.request_id
    request.request_id = own_id(request.request_id)


def _check_ids(request_id: str, session_id: str | None) -> None:
    """Check the ids that a client may have chosen, in whatever part of its request. Raise RequestRefused."""
    chosen = (("request_id", chosen_by_client(request_id)), ("session_id", session_id or ""))
    if problem := problem_with(chosen):
        raise RequestRefused(Refusal(400, problem))


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


def _watch_requests(processor: OutputProcessor) -> None:
    """Wrap OutputProcessor.add_request so that the queue of a kept answer does not merge outputs, and that
    the account of an HTTP request knows the states of its engine's requests."""
    add_request = processor.add_request

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
        account = account_of_task.get()
        state = processor.request_states.get(request.request_id)
        if account is not None and state is not None:
            account.request_id = account.request_id or request.request_id
            state.account = account
            account.watch(state)

    processor.add_request = add


def _prepare_outputs(processor: OutputProcessor) -> None:
    """Have refusals of requests for one answer raised as RequestRefused by their queues, and times taken by
    this process's clock.

    With n > 1, vLLM's generator would not abort the other answers: see `_checked`.
    """
    process_outputs = processor.process_outputs

    def process(
        outputs: list[EngineCoreOutput],
        engine_s: float | None = None,
        *arguments: Any,
        **named_arguments: Any,
    ) -> OutputProcessorOutput:
        now_s = time.monotonic()
        for output in outputs:
            # None of them is set in most outputs.
            if (
                output.finish_reason is None
                and output.events is None
                and output.new_logprobs is None
                and output.new_prompt_logprobs_tensors is None
            ):
                continue
            state = processor.request_states.get(output.request_id)
            if state is None:
                continue
            correct_times(state, output, now_s if engine_s is None else engine_s, now_s)
            _leave_out_unasked(state, output)
            refusal = Refusal.decode(output.stop_reason) if output.finish_reason is _ERROR else None
            if refusal is not None:
                account = getattr(state, "account", None)
                if account is not None:
                    account.refused = True
            if state.detokenizer is None and output.pooling_output is None:
                # It ends without a result, for which vLLM has no case.
                output.pooling_output = EMPTY_CPU_TENSOR
                refusal = refusal or NOT_HANDLED
            if refusal is not None and state.parent_req is None and state.queue is not None:
                # The queue drops the output that follows.
                state.queue.put(RequestRefused(refusal))
        return process_outputs(outputs, now_s, *arguments, **named_arguments)

    processor.process_outputs = process


def _leave_out_unasked(state: RequestState, output: EngineCoreOutput) -> None:
    """Leave log-probabilities out that a request did not ask for: vLLM would give up all requests."""
    logprobs = state.logprobs_processor
    if logprobs is None or logprobs.num_logprobs is None:
        output.new_logprobs = None
    if logprobs is None or logprobs.num_prompt_logprobs is None:
        output.new_prompt_logprobs_tensors = None


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


def _submit(account: Account, sequences: int, prompt_tokens: int) -> None:
    """Count a prompt that goes to the engine. Raise RequestRefused."""
    try:
        account.submit(sequences, prompt_tokens)
    except LimitRefusal as refused:
        raise RequestRefused(Refusal(refused.status, refused.message)) from refused


def _account_for(renderer: BaseRenderer) -> None:
    """Have requests charged for what they tokenize, and prompts that are too long for a tenant refused before
    that, as far as their characters tell."""
    tokenize = renderer.tokenize_prompt_async

    async def accounted(prompt: Any, params: TokenizeParams) -> Any:
        account = account_of_task.get()
        if account is None:
            return await tokenize(prompt, params)
        text = prompt.get("prompt", "") if isinstance(prompt, dict) else ""
        characters = len(text) if isinstance(text, str) and "prompt_token_ids" not in prompt else 0
        longest = 0 if account.tenant is None else account.tenant.longest_prompt
        if longest and characters > longest * renderer.get_tokenizer().max_chars_per_token:
            raise VLLMValidationError(
                f"This key allows prompts of {longest} tokens, which {characters} characters exceed."
            )
        try:
            tokenized = await tokenize(prompt, params)
        except VLLMValidationError:
            # Too many tokens; how many is not known.
            account.tokenized += characters // _CHARACTERS_PER_TOKEN
            raise
        account.tokenized += _prompt_tokens(tokenized)
        return tokenized

    renderer.tokenize_prompt_async = accounted


def _salted(prompt: Any, tenant: Tenant) -> dict[str, Any]:
    """Return the rendered prompt with a salt by which only its tenant, and those that share a cache with it,
    find its KV."""
    if prompt["type"] == "enc_dec":
        # The decoder's part names the blocks.
        return {**prompt, "decoder_prompt": _salted(prompt["decoder_prompt"], tenant)}
    return {**prompt, "cache_salt": tenant.cache_salt(prompt.get("cache_salt"))}


def _prompt_tokens(prompt: Any) -> int:
    """Return the prompt's number of tokens; 0 if it does not consist of tokens."""
    ids = (
        prompt.get("prompt_token_ids")
        if isinstance(prompt, dict)
        else getattr(prompt, "prompt_token_ids", None)
    )
    return 0 if ids is None else len(ids)
