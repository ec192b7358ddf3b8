"""vLLM's engine client with what a fleet behind it needs: trace context, and 503 when nothing can serve."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from copy import copy
from http import HTTPStatus
from typing import Any

from vllm.config import ObservabilityConfig
from vllm.exceptions import GracefulHTTPError
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from frontend_svc.admission import AdmissionReader
from frontend_svc.refusal import NO_INSTANCE


class NoInstance(GracefulHTTPError):  # type: ignore[misc]
    """Nothing in the fleet can take the request now."""

    def __init__(self) -> None:
        super().__init__("No instance can take this request now.", HTTPStatus.SERVICE_UNAVAILABLE)


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
        """Refuse before a response is started. Raises NoInstance, or what vLLM's own limits raise."""
        if not self.admission.is_open:
            raise NoInstance
        super().check_admission(n, request_id)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's stream; a request that found no instance ends as 503 instead of 500."""
        outputs = super().generate(*args, **kwargs)
        try:
            async for output in outputs:
                if output.finished and any(o.stop_reason == NO_INSTANCE for o in output.outputs):
                    raise NoInstance
                yield output
        finally:
            await outputs.aclose()
