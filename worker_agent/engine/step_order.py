"""Turn an intra-instance policy's decisions into one step of a continuous batch.

`tailrace.intra.allocate` makes the decisions, as in the simulator. This module prepares its input from the
state of an engine's scheduler and derives what the scheduler must do. It does not depend on any engine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tailrace.intra.allocate import Claim, Room, allocate
from tailrace.intra.base import FEWEST_DECODING, IntraPolicy, JobView, Rank, TokenIntervals
from worker_agent.engine.turns import Turn


class Member(Hashable, Protocol):
    """One request of the engine, with the property names of vLLM's Request."""

    @property
    def num_tokens(self) -> int:
        """Return the number of prompt and output tokens."""

    @property
    def num_output_tokens(self) -> int:
        """Return the number of output tokens."""

    @property
    def num_output_placeholders(self) -> int:
        """Return the number of output tokens that steps in flight will add to `num_output_tokens`."""

    @property
    def num_computed_tokens(self) -> int:
        """Return the tokens whose KV is on the device, or will be when the steps in flight have ended."""


M = TypeVar("M", bound=Member)


@dataclass(frozen=True, slots=True)
class Device:
    """The device's resources between two steps."""

    total_blocks: int
    free_blocks: int
    # Free blocks that partly computed prompts will still need.
    promised_blocks: int
    free_slots: int
    # Requests that already have KV and a slot and decode from this step on.
    entering: int
    # Most tokens that a step may compute.
    step_tokens: int


@dataclass(slots=True)
class StepPlan(Generic[M]):
    """The actions for one step, in this order."""

    preempt: list[M]
    # Requests that continue, in the order in which they get the step's tokens; the last is preempted first.
    running: list[M]
    # Prompts that stay on the device but skip this step.
    withheld: list[M]
    # Requests to admit, in the order in which they get tokens, after the running ones.
    admit: list[M]
    step_tokens: int
    # Most tokens that the step may compute for one request; None: no limit.
    longest_chunk: int | None
    # Whether prompts wait for the running requests to get faster.
    keeps_back: bool


class StepOrder(Generic[M]):
    """One policy on one engine. Its only state between steps is in the requests' turns: `passed_blocks`, and
    whether their ranks have lapsed."""

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
        intervals: Callable[[], TokenIntervals | None],
    ) -> None:
        """`held_blocks` returns the number of a running request's blocks, `swapped` whether its KV is in host
        memory, and `exempt` whether it is running and must not be preempted."""
        self.policy = policy
        self._block_tokens = block_tokens
        self.rank = rank
        self._turn = turn
        self._held_blocks = held_blocks
        self._swapped = swapped
        self._exempt = exempt
        self._view = view
        self._intervals = intervals

    def lapses_s(self, member: M) -> float | None:
        """Return when a waiting request's rank changes by itself, in seconds since the epoch; None: never."""
        return None if self._turn(member).lapsed else self.policy.lapses_s(self._view(member))

    def lapse(self, member: M) -> None:
        """Mark a request's rank as lapsed, at the time given by `lapses_s`."""
        self._turn(member).lapse()

    def plan(self, running: Sequence[M], waiting: Iterable[tuple[Rank, M]], device: Device) -> StepPlan[M]:
        """Plan one step. `waiting` has the requests that can start, in order of rank; it is read only as far
        as requests may be admitted. O(running) if memory and slots are plentiful, else O(running log
        running)."""
        decoding = [member for member in running if _decodes(member)]
        prompts = [(self.rank(member), member) for member in running if not _decodes(member)]
        prompts.sort(key=_first)
        growth = sum(map(self._growth, decoding))
        room = Room(
            device.total_blocks,
            device.free_blocks - device.promised_blocks - growth,
            device.free_slots,
            self.policy.prefill_budget(device.step_tokens, len(decoding) + device.entering),
            self._intervals() if self._keeps_back_for(decoding) else None,
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
        budget = decodes + self.policy.prefill_budget(device.step_tokens, decodes)
        # The engine must make progress even if the policy allows a single prompt no tokens.
        step_tokens = max(1, min(device.step_tokens, budget))
        fresh = [(self.rank(member), member) for member in grants.admit if not self._swapped(member)]
        follow = bool(grants.admit or device.entering)
        share = _share(prompts, fresh, max(0, step_tokens - decodes), follow)
        return StepPlan(
            preempt=grants.preempt,
            running=[*decoding, *share.served],
            withheld=share.withheld,
            # Each decoding request takes one token; the prompts share the rest.
            admit=[*returning, *(member for _, member in fresh)],
            step_tokens=step_tokens,
            longest_chunk=share.longest_chunk,
            keeps_back=grants.kept_back > 0,
        )

    def _keeps_back_for(self, decoding: Sequence[M]) -> bool:
        """Return whether prompts may have to wait for these."""
        if not self.policy.may_keep_back or len(decoding) < FEWEST_DECODING:
            return False
        return sum(not self._exempt(member) for member in decoding) >= FEWEST_DECODING

    def _growth(self, member: M) -> int:
        """Return 1 if the request's next token needs a new block, else 0."""
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
    """The prompts on the device that compute in this step, those that do not, and StepPlan.longest_chunk."""

    served: list[M]
    withheld: list[M]
    longest_chunk: int | None


def _share(
    prompts: Sequence[tuple[Rank, M]], fresh: Sequence[tuple[Rank, M]], tokens: int, follow: bool
) -> _Share[M]:
    """Distribute the step's tokens to prompts in order of rank. `prompts` are on the device, `fresh` are
    newly admitted.

    If `follow`, other requests (admitted or entering) are served after the running ones. A prompt that gets
    only part of its tokens must then be limited by the step's longest chunk; if that would also limit another
    prompt, it skips the step.
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
