"""Continuous batching: which requests compute how many tokens in the next step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tailrace.intra.base import IntraPolicy, Rank, TokenIntervals
from tailrace.profiles import Profile, SwapModel
from worker_agent.engine.host_ledger import HostLedger
from worker_agent.engine.simulated.kv import BlockPool
from worker_agent.engine.simulated.request import Request, State
from worker_agent.engine.step_order import Device, StepOrder
from worker_agent.engine.turns import RankedRequests, serving_phase


@dataclass(slots=True)
class Step:
    """One step's work. A request whose tokens are then all computed generates a new one."""

    # Requests that compute one token, the last sampled one.
    decodes: list[Request] = field(default_factory=list)
    # The others, with their numbers of tokens.
    chunks: list[tuple[Request, int]] = field(default_factory=list)
    ms: float = 0.0

    @property
    def tokens(self) -> int:
        """Return the tokens that the step computes."""
        return len(self.decodes) + sum(tokens for _, tokens in self.chunks)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory for preempted requests' KV, and the time that a step waits for each copy."""

    ledger: HostLedger
    swap: SwapModel


class Scheduler:
    """Schedules with chunked prefill, either first come, first served, as vLLM does, or by an intra-instance
    policy.

    First come, first served, running requests take precedence over waiting ones, and the youngest running one
    is preempted. A preempted decoding request is swapped out if host memory has room, else recomputed.
    """

    def __init__(
        self,
        pool: BlockPool,
        profile: Profile,
        max_num_seqs: int,
        max_batched_tokens: int,
        host: HostMemory,
        intervals: Callable[[], TokenIntervals | None],
        prefix_caching: bool = False,
    ) -> None:
        """`intervals` returns those of the requests that decode. `prefix_caching`: blocks returned to the
        pool keep their KV by name."""
        self.pool = pool
        self.prefix_caching = prefix_caching
        self.host = host.ledger
        self.running: list[Request] = []
        self.waiting: deque[Request] | RankedRequests[Request] = deque()
        self.intra: IntraPolicy | None = None
        # Requests with blocks that are paused or being imported; they occupy a slot of the batch.
        self.held = 0
        self.preemptions = 0
        # Steps beside which prompts waited for the running requests to get faster.
        self.kept_back_steps = 0
        # Tokens of prompts that were started, and those of them that were found in the cache.
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self._order: StepOrder[Request] | None = None
        self._profile = profile
        self._max_num_seqs = max_num_seqs
        self._max_batched_tokens = max_batched_tokens
        self._intervals = intervals
        self._swap = host.swap
        # Time that the step being planned waits for copies to and from host memory.
        self._swap_ms = 0.0

    @property
    def free_slots(self) -> int:
        """Return the number of requests that may still be added to the batch."""
        return self._max_num_seqs - len(self.running) - self.held

    def use_policy(self, policy: IntraPolicy | None) -> None:
        """Order requests by this policy from the next step on; None: first come, first served."""
        self.intra = policy
        if policy is None:
            self._use_own_order()
            return
        waiting = list(self.waiting)
        self._order = StepOrder(
            policy,
            self.pool.block_tokens,
            lambda request: _rank(policy, request),
            lambda request: request.turn,
            lambda request: len(request.blocks),
            self.on_host,
            lambda request: request.exporting,
            lambda request: request.view,
            self._intervals,
        )
        order = self._order
        self.waiting = RankedRequests(order.rank, order.lapses_s, order.lapse, waiting)

    def _use_own_order(self) -> None:
        self._order, self.waiting = None, deque(sorted(self.waiting, key=lambda each: each.turn.arrival))

    def on_host(self, request: Request) -> bool:
        """Return whether the request's KV is in host memory."""
        return self.host.get(request.request_id) is not None

    def _names(self, request: Request) -> list[bytes]:
        """Return the names of the request's computed full blocks, or none without prefix caching."""
        return (
            request.chain.full(0, request.computed // self.pool.block_tokens) if self.prefix_caching else []
        )

    # ---- adding and removing requests

    def enqueue(self, request: Request) -> None:
        """Add a new request to the waiting ones."""
        request.state = State.WAITING
        self._queue(request)

    def hold(self, request: Request, state: State) -> None:
        """Keep the request's KV and its slot, if it has one, without running it (PAUSED or IMPORTING)."""
        if request.state is State.RUNNING:
            self.running.remove(request)
        elif request.state is State.PREEMPTED:
            self.waiting.remove(request)
        request.state = state
        self.held += bool(request.blocks)

    def run(self, request: Request) -> None:
        """Run a held request, or add it to the waiting ones if its KV is in host memory."""
        if self.on_host(request):
            request.state = State.PREEMPTED
            self._queue_again(request)
            return
        request.state = State.RUNNING
        self.held -= 1
        self.running.append(request)

    def drop(self, request: Request) -> None:
        """Remove the request and free its blocks."""
        state = request.state
        if state is State.RUNNING:
            self.running.remove(request)
        elif state in (State.WAITING, State.PREEMPTED):
            self.waiting.remove(request)
        elif state in (State.PAUSED, State.IMPORTING):
            self.held -= bool(request.blocks)
        request.state = State.GONE
        self.host.drop(request.request_id)
        self.pool.release(request.blocks, self._names(request))

    def _queue(self, request: Request) -> None:
        if isinstance(self.waiting, RankedRequests):
            self.waiting.add(request)
        else:
            self.waiting.append(request)

    def _queue_again(self, request: Request) -> None:
        if isinstance(self.waiting, RankedRequests):
            self.waiting.add(request)
        else:
            self.waiting.appendleft(request)

    # ---- one step

    def plan(self) -> Step | None:
        """Plan the next step and allocate its blocks; return None if no request can run."""
        step = Step()
        self._swap_ms = 0.0
        if self._order is not None and self._order.policy.mistake:
            self._use_own_order()
        if self._order is None:
            prefill_ms, kv_tokens = self._plan_fcfs(step)
        else:
            prefill_ms, kv_tokens = self._plan_in_order(step, self._order)
        if not step.decodes and not step.chunks:
            return None
        step.ms = self._profile.step_ms(prefill_ms, len(step.decodes), kv_tokens)
        step.ms += self._swap_ms
        return step

    def _plan_fcfs(self, step: Step) -> tuple[float, int]:
        """Plan a step first come, first served. Return the prompts' milliseconds and the decodes' KV
        tokens."""
        before = self.preemptions
        max_tokens = self._max_batched_tokens
        budget, prefill_ms, kv_tokens = self._plan_running(step, max_tokens, max_tokens)
        # A request that was just preempted must not take the room that this made.
        idle = not step.decodes and not step.chunks
        if self.waiting and (idle or self.preemptions == before):
            admitted_ms, admitted_tokens = self._admit(step, budget, self._waiting_fcfs())
            return prefill_ms + admitted_ms, kv_tokens + admitted_tokens
        return prefill_ms, kv_tokens

    def _waiting_fcfs(self) -> Iterator[Request]:
        """Yield the first waiting request; the consumer must remove it before it asks for the next one."""
        while self.waiting:
            yield next(iter(self.waiting))

    def _plan_in_order(self, step: Step, order: StepOrder[Request]) -> tuple[float, int]:
        assert isinstance(self.waiting, RankedRequests)
        self.waiting.advance(time.time())
        device = Device(
            total_blocks=self.pool.total,
            free_blocks=self.pool.free,
            # A prompt gets all its blocks at its start.
            promised_blocks=0,
            free_slots=self.free_slots,
            entering=0,
            step_tokens=self._max_batched_tokens,
        )
        plan = order.plan(self.running, self.waiting.ranked(), device)
        for request in plan.preempt:
            self._preempt(request)
        self.running = plan.running
        self.kept_back_steps += plan.keeps_back
        longest = plan.longest_chunk or plan.step_tokens
        budget, prefill_ms, kv_tokens = self._plan_running(step, plan.step_tokens, longest)
        admitted_ms, admitted_tokens = self._admit(step, budget, plan.admit)
        self.running += plan.withheld
        return prefill_ms + admitted_ms, kv_tokens + admitted_tokens

    def _plan_running(self, step: Step, budget: int, longest: int) -> tuple[int, float, int]:
        """Plan the running requests, each with at most `longest` tokens. Return the tokens left of the
        budget, the prompts' milliseconds and the decodes' KV tokens."""
        prefill_ms = 0.0
        kv_tokens = 0
        running = self.running
        block_tokens = self.pool.block_tokens
        at = 0
        while at < len(running) and budget > 0:
            request = running[at]
            tokens = min(request.total - request.computed, longest, budget)
            end = request.computed + tokens
            if end > len(request.blocks) * block_tokens and not self._make_room(at, end):
                continue
            at += 1
            budget -= tokens
            if request.decodes:
                step.decodes.append(request)
                kv_tokens += end
            else:
                step.chunks.append((request, tokens))
                prefill_ms += self._profile.prefill.ms(request.computed, end)
        return budget, prefill_ms, kv_tokens

    def _make_room(self, at: int, tokens: int) -> bool:
        """Allocate blocks for running[at], preempting requests behind it as needed. Return False if it was
        preempted itself."""
        request = self.running[at]
        blocks = self.pool.blocks_for(tokens)
        while not self.pool.grow(request.blocks, blocks):
            victim = self._victim(at)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _victim(self, at: int) -> Request:
        for request in reversed(self.running[at:]):
            if not request.exporting:
                return request
        return self.running[-1]

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.preemptions += 1
        request.state = State.PREEMPTED
        blocks, names = self.pool.blocks_for(request.computed), self._names(request)
        swapped = None
        if request.decodes and self.host.total:
            # A block's content follows from its tokens, so it needs no name.
            swapped = self.host.swap_out(request.request_id, request.computed, [b""] * blocks)
        if swapped is None:
            request.computed = 0
            # Its blocks are lost, including those that its export has pinned.
            request.exported_outputs = None
        else:
            self._swap_ms += self._swap.ms(blocks * self.host.block_bytes)
        self.pool.release(request.blocks, names)
        self._queue_again(request)

    def _admit(self, step: Step, budget: int, requests: Iterable[Request]) -> tuple[float, int]:
        """Admit requests in this order until there is no room for one. Return the prompts' milliseconds and
        the decodes' KV tokens."""
        prefill_ms = 0.0
        kv_tokens = 0
        for request in requests:
            # All its tokens must fit, not only the first chunk; otherwise two long prompts preempt each
            # other.
            if budget <= 0 or self.free_slots < 1:
                break
            blocks = self.pool.blocks_for(request.total)
            if blocks > self.pool.free:
                break
            if self.prefix_caching and not self.on_host(request):
                names = request.chain.full(0, (request.total - 1) // self.pool.block_tokens)
                request.computed = self.pool.take_named(request.blocks, names) * self.pool.block_tokens
            self.pool.grow(request.blocks, blocks)
            self.waiting.remove(request)
            request.state = State.RUNNING
            self.running.append(request)
            swapped = self.host.swap_in(request.request_id)
            if swapped is not None:
                self.host.release(swapped.slots)
                self._swap_ms += self._swap.ms(len(swapped.slots) * self.host.block_bytes)
                step.decodes.append(request)
                kv_tokens += request.total
                budget -= 1
                continue
            start = request.computed
            self.prompt_tokens += request.total
            self.cached_prompt_tokens += start
            tokens = min(request.total - start, budget)
            budget -= tokens
            step.chunks.append((request, tokens))
            prefill_ms += self._profile.prefill.ms(start, start + tokens)
        return prefill_ms, kv_tokens


def _rank(policy: IntraPolicy, request: Request) -> Rank:
    turn, outputs = request.turn, len(request.outputs)
    reasons = request.reasons and request.reasoning_end is None
    if not turn.is_current(policy, serving_phase(outputs, reasons), outputs):
        turn.update(policy, request.view)
    return turn.rank
