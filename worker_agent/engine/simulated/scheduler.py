"""Continuous batching: who computes how many tokens in the next step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tailrace.intra.base import IntraPolicy, Rank
from tailrace.profiles import Profile, SwapModel
from worker_agent.engine.host_ledger import HostLedger
from worker_agent.engine.ranked_line import RankedLine
from worker_agent.engine.simulated.blocks import BlockPool
from worker_agent.engine.simulated.request import Request, State
from worker_agent.engine.step_order import Device, StepOrder
from worker_agent.engine.turns import serving_phase


@dataclass(slots=True)
class Step:
    """One step's work. A request that computes all its tokens makes a new one."""

    # Requests that compute one token, the last sampled one.
    decodes: list[Request] = field(default_factory=list)
    # (request, tokens) for the others.
    chunks: list[tuple[Request, int]] = field(default_factory=list)
    ms: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens that it computes."""
        return len(self.decodes) + sum(tokens for _, tokens in self.chunks)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Where preempted requests' KV goes, and how long a step waits for each that is copied."""

    ledger: HostLedger
    swap: SwapModel


class Scheduler:
    """First come, first served, with chunked prefill, as vLLM's; or in the order of an intra-instance policy.

    In the first, running requests go before waiting ones; of the running, the youngest gives way. A request
    that decodes and gives way goes to host memory, if there is room, and is computed anew if not.
    """

    def __init__(
        self,
        pool: BlockPool,
        profile: Profile,
        max_num_seqs: int,
        max_batched_tokens: int,
        host: HostMemory,
        keeps_names: bool = False,
    ) -> None:
        """`keeps_names`: blocks that come back to the pool keep their KV by name."""
        self.pool = pool
        self.keeps_names = keeps_names
        self.host = host.ledger
        self.running: list[Request] = []
        self.waiting: deque[Request] | RankedLine[Request] = deque()
        self.intra: IntraPolicy | None = None
        # Requests that are paused or being imported with blocks: they count as running ones.
        self.held = 0
        self.preemptions = 0
        # Of prompts that were begun, and of those that were found in the cache.
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self._order: StepOrder[Request] | None = None
        self._profile = profile
        self._max_num_seqs = max_num_seqs
        self._max_batched_tokens = max_batched_tokens
        self._swap = host.swap
        # What the step that is being planned waits for copies to and from host memory.
        self._swap_ms = 0.0

    @property
    def free_slots(self) -> int:
        """How many more requests may run."""
        return self._max_num_seqs - len(self.running) - self.held

    def use(self, policy: IntraPolicy | None) -> None:
        """Order requests by this policy from the next step on; None: first come, first served."""
        self.intra = policy
        waiting = list(self.waiting)
        if policy is None:
            self._order, self.waiting = None, deque(waiting)
            return
        self._order = StepOrder(
            policy,
            self.pool.block_tokens,
            lambda request: _rank(policy, request),
            lambda request: request.turn,
            lambda request: len(request.blocks),
            self.on_host,
            lambda request: request.exporting,
            lambda request: request.view,
        )
        order = self._order
        self.waiting = RankedLine(order.rank, order.lapses_s, order.lapse, waiting)

    def on_host(self, request: Request) -> bool:
        """Its KV is in host memory."""
        return self.host.get(request.request_id) is not None

    def _names(self, request: Request) -> list[bytes]:
        """Of its computed full blocks, if the pool is to keep them."""
        return request.chain.full(0, request.computed // self.pool.block_tokens) if self.keeps_names else []

    # ---- entering and leaving

    def enqueue(self, request: Request) -> None:
        """A new request waits for its turn."""
        request.state = State.WAITING
        self._queue(request)

    def hold(self, request: Request, state: State) -> None:
        """Keep the request's KV, and its place if it has one, but do not run it (PAUSED or IMPORTING)."""
        if request.state is State.RUNNING:
            self.running.remove(request)
        elif request.state is State.PREEMPTED:
            self.waiting.remove(request)
        request.state = state
        self.held += bool(request.blocks)

    def run(self, request: Request) -> None:
        """Let a held request run, or wait for its turn if its KV is in host memory."""
        if self.on_host(request):
            request.state = State.PREEMPTED
            self._queue_again(request)
            return
        request.state = State.RUNNING
        self.held -= 1
        self.running.append(request)

    def drop(self, request: Request) -> None:
        """Forget the request and free its blocks."""
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
        if isinstance(self.waiting, RankedLine):
            self.waiting.add(request)
        else:
            self.waiting.append(request)

    def _queue_again(self, request: Request) -> None:
        if isinstance(self.waiting, RankedLine):
            self.waiting.add(request)
        else:
            self.waiting.appendleft(request)

    # ---- one step

    def plan(self) -> Step | None:
        """Choose the next step's work and give it its blocks; None when nobody can run."""
        step = Step()
        self._swap_ms = 0.0
        if self._order is None:
            prefill_ms, kv_tokens = self._plan_in_turn(step)
        else:
            prefill_ms, kv_tokens = self._plan_in_order(step, self._order)
        if not step.decodes and not step.chunks:
            return None
        step.ms = self._profile.step_ms(prefill_ms, len(step.decodes), kv_tokens)
        step.ms += self._swap_ms
        return step

    def _plan_in_turn(self, step: Step) -> tuple[float, int]:
        """(Milliseconds of the prompts, KV tokens of the decodes)."""
        before = self.preemptions
        most = self._max_batched_tokens
        budget, prefill_ms, kv_tokens = self._plan_running(step, most, most)
        # Who was preempted just now must not take the room that was made.
        idle = not step.decodes and not step.chunks
        if self.waiting and (idle or self.preemptions == before):
            admitted_ms, admitted_tokens = self._admit(step, budget, self._in_turn())
            return prefill_ms + admitted_ms, kv_tokens + admitted_tokens
        return prefill_ms, kv_tokens

    def _in_turn(self) -> Iterator[Request]:
        """Whoever is first in the line, as long as the one before was let in."""
        while self.waiting:
            yield next(iter(self.waiting))

    def _plan_in_order(self, step: Step, order: StepOrder[Request]) -> tuple[float, int]:
        assert isinstance(self.waiting, RankedLine)
        self.waiting.advance(time.time())
        device = Device(
            total_blocks=self.pool.total,
            free_blocks=self.pool.free,
            # A prompt has the blocks for all of it from the start.
            promised_blocks=0,
            free_seats=self.free_slots,
            entering=0,
            step_tokens=self._max_batched_tokens,
        )
        plan = order.plan(self.running, self.waiting.ranked(), device)
        for request in plan.preempt:
            self._preempt(request)
        self.running = plan.running
        longest = plan.longest_chunk or plan.step_tokens
        budget, prefill_ms, kv_tokens = self._plan_running(step, plan.step_tokens, longest)
        admitted_ms, admitted_tokens = self._admit(step, budget, plan.admit)
        self.running += plan.withheld
        return prefill_ms + admitted_ms, kv_tokens + admitted_tokens

    def _plan_running(self, step: Step, budget: int, longest: int) -> tuple[int, float, int]:
        """(Tokens left, milliseconds of the prompts, KV tokens of the decodes). `longest`: most of one."""
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
        """Blocks for running[at], at the cost of those behind it; False when it had to give way itself."""
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
            # What a block holds follows from the tokens: there is nothing to name.
            swapped = self.host.swap_out(request.request_id, request.computed, [b""] * blocks)
        if swapped is None:
            request.computed = 0
            # Its blocks are gone, and with them what its export has pinned.
            request.exported_outputs = None
        else:
            self._swap_ms += self._swap.ms(blocks * self.host.block_bytes)
        self.pool.release(request.blocks, names)
        self._queue_again(request)

    def _admit(self, step: Step, budget: int, requests: Iterable[Request]) -> tuple[float, int]:
        """Let them run, in this order, until one finds no room."""
        prefill_ms = 0.0
        kv_tokens = 0
        for request in requests:
            # All its tokens must fit, not only the first chunk, or two long prompts preempt each other.
            if budget <= 0 or self.free_slots < 1:
                break
            blocks = self.pool.blocks_for(request.total)
            if blocks > self.pool.free:
                break
            if self.keeps_names and not self.on_host(request):
                names = request.chain.full(0, (request.total - 1) // self.pool.block_tokens)
                request.computed = self.pool.take(request.blocks, names) * self.pool.block_tokens
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
    reasons = request.reasons and request.closes_at is None
    if not turn.is_current(policy, serving_phase(outputs, reasons), outputs):
        turn.update(policy, request.view)
    return turn.rank
