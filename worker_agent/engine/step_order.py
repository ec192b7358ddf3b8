"""From an intra-instance policy's decisions to one step of a continuous batch.

The decisions are `tailrace.intra.allocate`'s, as in the simulator; here is what an engine's scheduler must
know to make them, and what it has to do about them. Nothing here depends on an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tailrace.intra.allocate import Claim, Room, allocate
from tailrace.intra.base import IntraPolicy, JobView, Rank
from worker_agent.engine.turns import Turn


class Member(Hashable, Protocol):
    """One request of the engine. Names and meaning are those of vLLM's Request."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""

    @property
    def num_output_tokens(self) -> int:
        """Output."""

    @property
    def num_output_placeholders(self) -> int:
        """Output tokens that steps in flight make, beyond those of `num_output_tokens`."""

    @property
    def num_computed_tokens(self) -> int:
        """Those whose KV is on the device, or will be when the steps in flight have ended."""


M = TypeVar("M", bound=Member)


@dataclass(frozen=True, slots=True)
class Device:
    """What the device has at a step boundary."""

    total_blocks: int
    free_blocks: int
    # Of the free ones, what prompts that have begun will still need.
    promised_blocks: int
    free_seats: int
    # Requests that hold KV and a place already and decode from this step on.
    entering: int
    # Tokens that a step may compute.
    step_tokens: int


@dataclass(slots=True)
class StepPlan(Generic[M]):
    """What to do, in this order."""

    preempt: list[M]
    # Those that stay, in the order in which the step's tokens go to them: the last gives way first.
    running: list[M]
    # Of those that stay: prompts that sit out this step.
    withheld: list[M]
    # In the order in which the step's tokens go to them, after those that run.
    admit: list[M]
    step_tokens: int
    # Most tokens that the step may compute of one request; None: as many as there are.
    longest_chunk: int | None


class StepOrder(Generic[M]):
    """One policy on one engine. All that it keeps between steps is in the requests' turns: `passed_blocks`,
    and whether they have lapsed."""

    def __init__(
        self,
        policy: IntraPolicy,
        block_tokens: int,
        rank: Callable[[M], Rank],
        turn: Callable[[M], Turn],
        held_blocks: Callable[[M], int],
        swapped: Callable[[M], bool],
        exempt: Callable[[M], bool],
        view: Callable[[M], JobView],
    ) -> None:
        """`held_blocks`: blocks that a running request has. `swapped`: its KV is in host memory. `exempt`: it
        runs and is not to be preempted."""
        self.policy = policy
        self._block_tokens = block_tokens
        self.rank = rank
        self._turn = turn
        self._held_blocks = held_blocks
        self._swapped = swapped
        self._exempt = exempt
        self._view = view

    def lapses_s(self, member: M) -> float | None:
        """When the rank of one that waits changes by itself, in seconds since the epoch; None: no more."""
        return None if self._turn(member).lapsed else self.policy.lapses_s(self._view(member))

    def lapse(self, member: M) -> None:
        """That time has come."""
        self._turn(member).lapse()

    def plan(self, running: Sequence[M], waiting: Iterable[tuple[Rank, M]], device: Device) -> StepPlan[M]:
        """Decide for one step. `waiting`: in order of rank, without those that cannot start; read only as far
        as there is hope. O(running) when memory and places abound, else O(running log running)."""
        decoding = [member for member in running if _decodes(member)]
        prompts = [(self.rank(member), member) for member in running if not _decodes(member)]
        prompts.sort(key=_first)
        growth = sum(map(self._growth, decoding))
        room = Room(
            device.total_blocks,
            device.free_blocks - device.promised_blocks - growth,
            device.free_seats,
            self.policy.prefill_budget(device.step_tokens, len(decoding) + device.entering),
        )
        grants = allocate(
            self.policy,
            lambda: [self._claim(member) for member in running if not self._exempt(member)],
            (self._wanting(rank, member) for rank, member in waiting),
            room,
            ((rank, _left(member)) for rank, member in prompts),
        )
        for member in grants.admit:
            self._turn(member).passed_blocks = 0
        for member, blocks in grants.passed:
            self._turn(member).passed_blocks += blocks
        if grants.preempt:
            victims = set(grants.preempt)
            decoding = [member for member in decoding if member not in victims]
            prompts = [(rank, member) for rank, member in prompts if member not in victims]
        if room.free_blocks < 0:
            decoding.sort(key=self.rank)
        returning = [member for member in grants.admit if self._swapped(member)]
        decodes = len(decoding) + len(returning) + device.entering
        wanted = decodes + self.policy.prefill_budget(device.step_tokens, decodes)
        # A policy that allows a lone prompt nothing must not stop the engine.
        step_tokens = max(1, min(device.step_tokens, wanted))
        fresh = [(self.rank(member), member) for member in grants.admit if not self._swapped(member)]
        follow = bool(grants.admit or device.entering)
        share = _share(prompts, fresh, max(0, step_tokens - decodes), follow)
        return StepPlan(
            preempt=grants.preempt,
            running=[*decoding, *share.served],
            withheld=share.withheld,
            # Those that decode take a token each; the prompts share what is left.
            admit=[*returning, *(member for _, member in fresh)],
            step_tokens=step_tokens,
            longest_chunk=share.longest_chunk,
        )

    def _growth(self, member: M) -> int:
        """1 if its next token begins a block that it does not have yet."""
        computed = member.num_computed_tokens
        if computed % self._block_tokens:
            return 0
        return int(self._held_blocks(member) * self._block_tokens <= computed)

    def _blocks(self, member: M) -> int:
        return -(-_tokens(member) // self._block_tokens)

    def _claim(self, member: M) -> Claim[M]:
        return Claim(self.rank(member), member, self._blocks(member))

    def _wanting(self, rank: Rank, member: M) -> Claim[M]:
        prompt = 0 if self._swapped(member) else _tokens(member)
        return Claim(rank, member, self._blocks(member), prompt, self._turn(member).passed_blocks)


@dataclass(frozen=True, slots=True)
class _Share(Generic[M]):
    """Prompts on the device: who computes in this step, who does not; StepPlan.longest_chunk."""

    served: list[M]
    withheld: list[M]
    longest_chunk: int | None


def _share(
    prompts: Sequence[tuple[Rank, M]], fresh: Sequence[tuple[Rank, M]], tokens: int, follow: bool
) -> _Share[M]:
    """The step's tokens go to prompts in order of rank. `prompts`: on the device; `fresh`: admitted just now.

    `follow`: others, admitted or entering, are served after those that run. A prompt that is to have what
    these leave is held to that, by the longest chunk that the step allows; where this would cut another one,
    it sits out.
    """
    served: list[M] = []
    withheld: list[M] = []
    running = {member for _, member in prompts}
    longest, partly = 0, None
    for _, member in sorted([*prompts, *fresh], key=_first):
        chunk = min(tokens, _left(member))
        tokens -= chunk
        if member not in running:
            longest = max(longest, chunk)
        elif not chunk:
            withheld.append(member)
        elif chunk < _left(member):
            partly = (member, chunk)
        else:
            served.append(member)
            longest = max(longest, chunk)
    if partly is None:
        return _Share(served, withheld, None)
    member, chunk = partly
    if not follow:
        return _Share([*served, member], withheld, None)
    if chunk < longest:
        return _Share(served, [member, *withheld], None)
    return _Share([*served, member], withheld, chunk)


def _decodes(member: Member) -> bool:
    return member.num_output_tokens + member.num_output_placeholders > 0 and _left(member) == 1


def _left(member: Member) -> int:
    return _tokens(member) - member.num_computed_tokens


def _tokens(member: Member) -> int:
    return member.num_tokens + member.num_output_placeholders


def _first(entry: tuple[Rank, object]) -> Rank:
    return entry[0]
