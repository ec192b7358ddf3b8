"""Continuous batching: who computes how many tokens in the next step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tailrace.profiles import Profile
from worker_agent.engine.simulated.blocks import BlockPool
from worker_agent.engine.simulated.request import Request, State


@dataclass(slots=True)
class Step:
    """One step's work. A request that computes all its tokens makes a new one."""

    # Requests that compute one token, the last sampled one.
    decodes: list[Request] = field(default_factory=list)
    # (request, tokens) for the others.
    chunks: list[tuple[Request, int]] = field(default_factory=list)
    ms: float = 0.0


class Scheduler:
    """First come, first served, with chunked prefill and preemption by recomputing, as vLLM's.

    Running requests go before waiting ones; of the running, the youngest gives way.
    """

    def __init__(self, pool: BlockPool, profile: Profile, max_num_seqs: int, max_batched_tokens: int) -> None:
        self.pool = pool
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        # Requests that are paused or being imported: they count as running ones.
        self.held = 0
        self.preemptions = 0
        self._profile = profile
        self._max_num_seqs = max_num_seqs
        self._max_batched_tokens = max_batched_tokens

    @property
    def free_slots(self) -> int:
        """How many more requests may run."""
        return self._max_num_seqs - len(self.running) - self.held

    # ---- entering and leaving

    def enqueue(self, request: Request) -> None:
        """A new request waits for its turn."""
        request.state = State.WAITING
        self.waiting.append(request)

    def hold(self, request: Request, state: State) -> None:
        """Keep the request's blocks and its place, but do not run it (PAUSED or IMPORTING)."""
        if request.state is State.RUNNING:
            self.running.remove(request)
        request.state = state
        self.held += 1

    def run(self, request: Request) -> None:
        """Let a held request run."""
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
            self.held -= 1
        request.state = State.GONE
        self.pool.release(request.blocks)

    # ---- one step

    def plan(self) -> Step | None:
        """Choose the next step's work and give it its blocks; None when nobody can run."""
        step = Step()
        before = self.preemptions
        budget, prefill_ms, kv_tokens = self._plan_running(step)
        # Who was preempted just now must not take the room that was made.
        idle = not step.decodes and not step.chunks
        if self.waiting and (idle or self.preemptions == before):
            prefill_ms += self._admit(step, budget)
        if not step.decodes and not step.chunks:
            return None
        step.ms = self._profile.step_ms(prefill_ms, len(step.decodes), kv_tokens)
        return step

    def _plan_running(self, step: Step) -> tuple[int, float, int]:
        budget = self._max_batched_tokens
        prefill_ms = 0.0
        kv_tokens = 0
        running = self.running
        block_tokens = self.pool.block_tokens
        at = 0
        while at < len(running) and budget > 0:
            request = running[at]
            tokens = request.total - request.computed
            if tokens > budget:
                tokens = budget
            end = request.computed + tokens
            if end > len(request.blocks) * block_tokens and not self._make_room(at, end):
                continue
            at += 1
            budget -= tokens
            if tokens == 1 and request.outputs:
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
        self.pool.release(request.blocks)
        request.computed = 0
        # Its blocks are gone, and with them what its export has pinned.
        request.exported_outputs = None
        request.state = State.PREEMPTED
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _admit(self, step: Step, budget: int) -> float:
        prefill_ms = 0.0
        while self.waiting and budget > 0 and self.free_slots > 0:
            request = self.waiting[0]
            # All its tokens must fit, not only the first chunk, or two long prompts preempt each other.
            if not self.pool.grow(request.blocks, self.pool.blocks_for(request.total)):
                break
            self.waiting.popleft()
            request.state = State.RUNNING
            self.running.append(request)
            tokens = min(request.total, budget)
            budget -= tokens
            step.chunks.append((request, tokens))
            prefill_ms += self._profile.prefill.ms(0, tokens)
        return prefill_ms
