"""Mixed into vLLM's worker through `worker_extension_cls`: its KV, requests' states and hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from worker_agent.engine.vllm.batch_rows import BatchRows, rows_of_v1, rows_of_v2
from worker_agent.engine.vllm.connector import TailraceConnector
from worker_agent.engine.vllm.hidden_states import HiddenStateTap, StepStates
from worker_agent.engine.vllm.request_states import (
    Adoption,
    CachedStates,
    NoStates,
    RequestStates,
    Rewind,
)


class RunnerExtension:
    """Methods for `collective_rpc`. Names start with tailrace_, as they join vLLM's worker class."""

    if TYPE_CHECKING:
        use_v2_model_runner: bool
        model_runner: Any

    def tailrace_connector(self) -> TailraceConnector:
        """The worker side of the KV connector, which holds the KV tensors."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, TailraceConnector)
        return connector

    def tailrace_tap(self, take: Callable[[StepStates], None]) -> HiddenStateTap:
        """Hand the hidden states of steps to `take`."""
        runner = self.model_runner
        rows: BatchRows = rows_of_v2(runner) if self.use_v2_model_runner else rows_of_v1(runner)
        return HiddenStateTap(runner.get_model(), rows, take)

    def tailrace_adopt(self, adoption: Adoption) -> None:
        """RequestStates.adopt."""
        self._tailrace_states().adopt(adoption)

    def tailrace_forget(self, request_id: str) -> None:
        """RequestStates.forget."""
        self._tailrace_states().forget(request_id)

    def tailrace_rewind(self, rewind: Rewind) -> None:
        """RequestStates.rewind."""
        self._tailrace_states().rewind(rewind)

    def tailrace_generator_state(self, request_id: str) -> bytes:
        """RequestStates.generator_state."""
        return self._tailrace_states().generator_state(request_id)

    def _tailrace_states(self) -> RequestStates:
        return NoStates() if self.use_v2_model_runner else CachedStates(self.model_runner)
