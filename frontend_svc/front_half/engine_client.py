"""vLLM's engine client with what a fleet behind it needs: trace context, and refusals with a status of
their own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from copy import copy
from http import HTTPStatus
from typing import Any

from vllm.config import ObservabilityConfig
from vllm.exceptions import GracefulHTTPError
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from frontend_svc.admission import AdmissionReader, AdmissionState
from frontend_svc.refusal import NO_INSTANCE, TOO_MANY_REQUESTS, Refusal


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
    observability_config: ObservabilityConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
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

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's stream; a request that `frontend_svc` refuses ends with the status that it gives."""
        outputs = super().generate(*args, **kwargs)
        try:
            async for output in outputs:
                if output.finished:
                    for each in output.outputs:
                        if (refusal := Refusal.decode(each.stop_reason)) is not None:
                            raise Refused(refusal)
                yield output
        finally:
            await outputs.aclose()
