"""Apply an intra-instance policy to a loaded engine."""

from __future__ import annotations

from vllm.v1.request import Request

from tailrace.intra.base import IntraPolicy, JobView, Rank
from worker_agent.engine.step_order import StepOrder
from worker_agent.engine.turns import Turn, serving_phase, view_of
from worker_agent.engine.vllm.load import LoadedCore
from worker_agent.engine.vllm.requests import VllmRequest, VllmRequests


def use_policy(policy: IntraPolicy | None, core: LoadedCore, table: VllmRequests) -> None:
    """Order requests by this policy, or as vLLM does if None. Engine thread, between two steps."""
    core.intra = policy
    core.scheduler.use_order(None if policy is None else _step_order(policy, core, table))


def job_view(entry: VllmRequest) -> JobView:
    """Return the request as an intra-instance policy sees it."""
    request, phases = entry.request, entry.phases
    return view_of(
        entry.turn,
        phases.reasons,
        request.num_prompt_tokens,
        request.num_output_tokens,
        phases.reasoning_tokens,
    )


def _step_order(policy: IntraPolicy, core: LoadedCore, table: VllmRequests) -> StepOrder[Request]:
    def entry_of(request: Request) -> VllmRequest:
        entry = table.get(request.request_id)
        # Between commands, the table has every request that the scheduler has.
        assert entry is not None
        return entry

    def turn_of(request: Request) -> Turn:
        return entry_of(request).turn

    def rank(request: Request) -> Rank:
        entry = entry_of(request)
        turn, outputs = entry.turn, request.num_output_tokens
        if not turn.is_current(policy, serving_phase(outputs, entry.phases.reasons), outputs):
            turn.update(policy, job_view(entry))
        return turn.rank

    def held_blocks(request: Request) -> int:
        return len(core.blocks_of(request.request_id))

    def swapped(request: Request) -> bool:
        return core.host.get(request.request_id) is not None

    def exempt(request: Request) -> bool:
        # KV that is not verified yet must not be swapped out: its new checksums would make it seem valid.
        scheduler, request_id = core.scheduler, request.request_id
        return request_id in scheduler.exporting or request_id in scheduler.unverified

    def view(request: Request) -> JobView:
        return job_view(entry_of(request))

    return StepOrder(policy, core.block_tokens, rank, turn_of, held_blocks, swapped, exempt, view)
