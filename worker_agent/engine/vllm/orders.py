"""An intra-instance policy, put to work on a loaded engine."""

from __future__ import annotations

from vllm.v1.request import Request

from tailrace.intra.base import IntraPolicy, Rank
from tailrace.intra.registry import make_intra
from worker_agent.engine.step_order import StepOrder
from worker_agent.engine.turns import serving_phase
from worker_agent.engine.vllm.load import LoadedCore
from worker_agent.engine.vllm.requests import RequestTable


def use_intra(name: str, core: LoadedCore, table: RequestTable) -> None:
    """Order requests by the policy of that name from the next step on. Engine thread, between two steps.

    Raises UnknownIntraError.
    """
    policy = make_intra(name)
    core.receives_on_host = policy is not None and policy.receives_on_host
    core.scheduler.use_order(None if policy is None else step_order(policy, core, table))


def step_order(policy: IntraPolicy, core: LoadedCore, table: RequestTable) -> StepOrder[Request]:
    """The policy's order of this engine's requests; phases are those of the table's trackers."""

    def rank(request: Request) -> Rank:
        entry = table.get(request.request_id)
        # Every request is in the table before the scheduler has it, and until it has left it.
        assert entry is not None
        phases, outputs = entry.phases, request.num_output_tokens
        return entry.turn.rank_at(
            policy,
            serving_phase(outputs, phases.reasons),
            request.num_prompt_tokens,
            outputs,
            phases.reasoning_tokens,
        )

    def held_blocks(request: Request) -> int:
        return len(core.blocks_of(request.request_id))

    def swapped(request: Request) -> bool:
        return core.host.get(request.request_id) is not None

    def exempt(request: Request) -> bool:
        return request.request_id in core.scheduler.exporting

    return StepOrder(policy, core.block_tokens, rank, held_blocks, swapped, exempt)
