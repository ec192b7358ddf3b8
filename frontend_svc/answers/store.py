"""The log of each kept answer, and the rules by which logs grow, move between front ends and are removed.

Pure: no I/O and no clock, so that tests can drive it through every order of events.

An answer is one HTTP request and the log of the engine outputs for it. One front end *serves* it; a second
one has a *copy*, which is a prefix of the log. A client that resumes it begins the next *run*: the request is
run again, the log is replayed to vLLM's API server, and what is missing is generated. A run ends when the
next one begins: nothing of an earlier run enters the log any more, wherever it comes from. Front ends that
cannot reach each other may both begin one, so run numbers are drawn at random to keep theirs different.
"""

from __future__ import annotations

import enum
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

# Memory of an answer and of an entry besides their contents, in bytes.
_ANSWER_BYTES: Final = 1024
_ENTRY_BYTES: Final = 240
# An answer is handed over in one message, which bounds its size whatever the total limit is.
_ANSWER_BYTES_MAX: Final = 64 << 20
# Removed answers whose ids are remembered, so that they are not reported as unknown.
_REMOVED_MAX: Final = 16_384
# Earlier runs of one answer for which the log's length at their end is remembered.
_RUNS_MAX: Final = 256
MAX_ANSWERS: Final = 65_536
"""Largest number of kept answers, copies included."""


@dataclass(frozen=True, slots=True)
class Head:
    """The request of an answer: what must be the same wherever it is run again."""

    answer_id: str
    # Empty if no API keys are required.
    tenant: str
    # The client's Idempotency-Key; empty if it sent none.
    key: str
    path: str
    body: bytes
    # Digest of the body as a JSON value.
    digest: bytes
    # The X-Request-Id with which it is run.
    request_name: str
    # Seconds since the epoch.
    created_s: int
    streams: bool


@dataclass(frozen=True, slots=True)
class LogEntry:
    """What one engine request of an answer produced in one step, or a note of the API server (with an empty
    part)."""

    part: str
    token_ids: Sequence[int]
    # Flags as in StepOutputs.
    flags: int
    # vLLM's EngineCoreOutputs with this output only; for a note, the note.
    frames: tuple[bytes, ...]
    # In the first entry of a part: key of the model that generated its tokens.
    model: str = ""

    @property
    def size(self) -> int:
        """Return the approximate size in bytes."""
        return _ENTRY_BYTES + len(self.part) + 4 * len(self.token_ids) + sum(map(len, self.frames))


@dataclass(slots=True, eq=False)
class KeptAnswer:
    """One answer and its log."""

    head: Head
    # The first run is 1; later numbers are drawn, each above the last. `ended`: for earlier runs, the number
    # of tokens in the log when they ended.
    run: int = 1
    ended: dict[int, int] = field(default_factory=dict)
    entries: list[LogEntry] = field(default_factory=list)
    tokens: int = 0
    # Whether the API server has sent all of it, or it is known to have ended.
    complete: bool = False
    # True if this front end serves it, False if it has a copy.
    served_here: bool = True
    # The front end that serves it.
    frontend_id: str = ""
    # Whether a client is connected and reads it.
    client_connected: bool = False
    # Whether the other front ends were asked if its idempotency key is in use; True without a key.
    key_confirmed: bool = True
    # Not in the store any more: further entries are not kept.
    removed: bool = False
    # When it last changed, in seconds of the caller's clock.
    touched_s: float = 0.0
    size: int = 0


class RemovalReason(enum.Enum):
    """Why an answer was removed."""

    EXPIRED = "expired"
    # To make room for others.
    NO_ROOM = "no_room"
    # It failed and must not be run again.
    FAILED = "failed"


class PartRefusal(enum.Enum):
    """Why a part of an answer that another front end serves is refused."""

    SUPERSEDED = "superseded"
    KEY_IN_USE = "key_in_use"
    FULL = "full"
    GAP = "gap"


class StoreFull(Exception):
    """There is no room for another answer."""


class AnswerTooLarge(StoreFull):
    """The request alone exceeds the size limit of one answer, so there never will be room."""


@dataclass(slots=True)
class Part:
    """A part of an answer's log, as sent from one front end to another."""

    answer_id: str
    run: int
    head: Head | None
    ended: dict[int, int]
    first_entry: int
    entries: list[LogEntry]
    complete: bool
    frontend_id: str


def _next_run(run: int) -> int:
    return run + 1 + secrets.randbelow(1 << 32)


@dataclass(slots=True)
class _Holding:
    """The answers of one tenant, least recently touched first."""

    answers: OrderedDict[str, KeptAnswer] = field(default_factory=OrderedDict)
    size: int = 0


class AnswerStore:
    """Hold all kept answers of one front end.

    Room is made at the expense of the tenant that holds most: one that holds at most an equal share loses
    nothing to the others.
    """

    def __init__(
        self,
        frontend_id: str,
        max_bytes: int,
        rank: Callable[[str, str], int],
        next_run: Callable[[int], int] = _next_run,
    ) -> None:
        """`max_bytes`: of all logs; one answer may use an eighth of it, at most 64 MiB.

        `rank(key, frontend_id)`: if two front ends get the same idempotency key at the same time, the one
        with the higher rank keeps it; must be the same function everywhere. `next_run(run)`: returns a number
        above `run` that differs between front ends.
        """
        self._frontend_id = frontend_id
        self._max_bytes = max_bytes
        self._max_answer_bytes = min(max_bytes // 8, _ANSWER_BYTES_MAX)
        self._rank = rank
        self._next_run = next_run
        # Least recently touched first.
        self._answers: OrderedDict[str, KeptAnswer] = OrderedDict()
        self._by_key: dict[tuple[str, str], KeptAnswer] = {}
        self._by_tenant: dict[str, _Holding] = {}
        # With the tenant that owned it.
        self._removed: OrderedDict[str, tuple[str, RemovalReason]] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._answers)

    def __iter__(self) -> Iterator[KeptAnswer]:
        return iter(list(self._answers.values()))

    def get(self, answer_id: str) -> KeptAnswer | None:
        """Return the answer with this id, or None."""
        return self._answers.get(answer_id)

    def find_by_key(self, tenant: str, key: str) -> KeptAnswer | None:
        """Return the answer with this tenant's idempotency key, or None."""
        return self._by_key.get((tenant, key))

    def removal_reason(self, tenant: str, answer_id: str) -> RemovalReason | None:
        """Return why the tenant's answer was removed; None if it was never here, or removed too long ago."""
        owner, reason = self._removed.get(answer_id, ("", None))
        return reason if owner == tenant else None

    # ---- served here

    def open(self, head: Head, now_s: float) -> KeptAnswer:
        """Create an answer, served here, at its first run.

        Raise StoreFull (AnswerTooLarge), or ValueError if its id or key is in use.
        """
        if head.answer_id in self._answers or (head.key and (head.tenant, head.key) in self._by_key):
            raise ValueError(f"answer {head.answer_id}: its id or key is in use")
        answer = KeptAnswer(head, frontend_id=self._frontend_id, key_confirmed=not head.key)
        self._insert(answer, now_s)
        answer.client_connected = True
        return answer

    def begin_run(self, answer: KeptAnswer, now_s: float) -> None:
        """Begin a new run of an answer that a client resumes here."""
        self._end_current(answer)
        if not answer.served_here:
            answer.served_here = answer.key_confirmed = True
        answer.client_connected = True
        answer.frontend_id = self._frontend_id
        self._touch(answer, now_s)

    def append(self, answer: KeptAnswer, entry: LogEntry, now_s: float) -> None:
        """Append an entry of the current run. An answer that has become too long is removed."""
        if answer.removed:
            return
        self._add(answer, [entry], now_s)
        if answer.size > self._max_answer_bytes or not self._make_room(answer):
            self.remove(answer, RemovalReason.NO_ROOM)

    def end_run(self, answer: KeptAnswer, run: int, complete: bool, now_s: float) -> None:
        """Record that no client is connected to this run any more. `complete`: the answer was sent to its
        end."""
        if answer.removed or run != answer.run:
            return
        answer.client_connected = False
        answer.complete = answer.complete or complete
        self._touch(answer, now_s)

    def remove(self, answer: KeptAnswer, reason: RemovalReason | None) -> None:
        """Remove an answer. `reason` None: leave no trace of it, so that it counts as unknown."""
        if answer.removed:
            return
        answer.removed = True
        self.size -= answer.size
        del self._answers[answer.head.answer_id]
        holding = self._by_tenant[answer.head.tenant]
        holding.size -= answer.size
        del holding.answers[answer.head.answer_id]
        if not holding.answers:
            del self._by_tenant[answer.head.tenant]
        if answer.head.key:
            del self._by_key[answer.head.tenant, answer.head.key]
        if reason is not None:
            self._removed[answer.head.answer_id] = (answer.head.tenant, reason)
            if len(self._removed) > _REMOVED_MAX:
                self._removed.popitem(last=False)

    # ---- between front ends

    def apply_part(self, part: Part, now_s: float) -> PartRefusal | KeptAnswer:
        """Apply a part sent by the front end that serves the answer; a part that arrives twice is applied
        once."""
        answer = self._answers.get(part.answer_id)
        if answer is None:
            if part.head is None or part.first_entry:
                # Do not request again what was removed for lack of room: it would displace the next answer.
                _, reason = self._removed.get(part.answer_id, ("", None))
                no_room = reason is RemovalReason.NO_ROOM
                return PartRefusal.FULL if no_room else PartRefusal.GAP
            copy = self._create_copy(part, part.head, now_s)
            if isinstance(copy, PartRefusal):
                return copy
            answer = copy
        elif part.run < answer.run or (part.run == answer.run and not _is_copy_of(answer, part)):
            return PartRefusal.SUPERSEDED
        elif part.first_entry > len(answer.entries):
            return PartRefusal.GAP
        if part.run > answer.run and part.first_entry < len(answer.entries):
            # The new run was begun from a shorter copy than this one: the entries beyond it do not exist
            # there.
            self._truncate(answer, part.first_entry)
        answer.run, answer.ended = part.run, dict(part.ended)
        answer.served_here = answer.client_connected = False
        answer.frontend_id = part.frontend_id
        self._add(answer, part.entries[len(answer.entries) - part.first_entry :], now_s)
        answer.complete = part.complete
        if answer.size > self._max_answer_bytes or not self._make_room(answer):
            self.remove(answer, RemovalReason.NO_ROOM)
            return PartRefusal.FULL
        return answer

    def hand_over(self, answer: KeptAnswer, frontend_id: str, now_s: float) -> Part:
        """Hand an answer to another front end, keep a copy here, and return all of it."""
        self._end_current(answer)
        answer.served_here = answer.client_connected = False
        answer.frontend_id = frontend_id
        self._touch(answer, now_s)
        return self.part_from(answer, 0)

    def claim(self, part: Part, now_s: float) -> KeptAnswer | None:
        """Serve an answer that another front end handed over, at the run that began with that.

        Return None if a later run is known here, or if there is no room.
        """
        answer = self._answers.get(part.answer_id)
        if answer is not None and answer.run >= part.run:
            return None
        if answer is not None:
            self.remove(answer, None)
        if part.head is None or self._with_key(part.head) is not None:
            return None
        answer = KeptAnswer(part.head, part.run, dict(part.ended), frontend_id=self._frontend_id)
        try:
            self._insert(answer, now_s)
        except StoreFull:
            return None
        answer.client_connected = True
        answer.complete = part.complete
        self._add(answer, part.entries, now_s)
        return answer

    def part_from(self, answer: KeptAnswer, first_entry: int, with_head: bool = True) -> Part:
        """Return the part of the log that follows the first `first_entry` entries."""
        return Part(
            answer.head.answer_id,
            answer.run,
            answer.head if with_head else None,
            dict(answer.ended),
            first_entry,
            answer.entries[first_entry:],
            answer.complete,
            answer.frontend_id,
        )

    def expire(self, now_s: float, keep_s: float) -> list[KeptAnswer]:
        """Remove and return answers unused for `keep_s` seconds. Answers that a client reads here stay."""
        removed = []
        for answer in list(self._answers.values()):
            if now_s - answer.touched_s <= keep_s:
                break
            if answer.client_connected:
                self._touch(answer, now_s)
                continue
            self.remove(answer, RemovalReason.EXPIRED)
            removed.append(answer)
        return removed

    # ---- internal

    def _end_current(self, answer: KeptAnswer) -> None:
        answer.ended[answer.run] = answer.tokens
        if len(answer.ended) > _RUNS_MAX:
            del answer.ended[min(answer.ended)]
        answer.run = self._next_run(answer.run)

    def _create_copy(self, part: Part, head: Head, now_s: float) -> PartRefusal | KeptAnswer:
        other = self._with_key(head)
        if other is not None:
            ours_first = self._rank(head.key, self._frontend_id) > self._rank(head.key, part.frontend_id)
            if other.key_confirmed or not other.served_here or ours_first:
                return PartRefusal.KEY_IN_USE
            # Both began at the same time; the request here will then find the other front end's answer.
            self.remove(other, None)
        answer = KeptAnswer(head, part.run, served_here=False, frontend_id=part.frontend_id)
        try:
            self._insert(answer, now_s)
        except StoreFull:
            return PartRefusal.FULL
        return answer

    def _with_key(self, head: Head) -> KeptAnswer | None:
        return self._by_key.get((head.tenant, head.key)) if head.key else None

    def _insert(self, answer: KeptAnswer, now_s: float) -> None:
        head = answer.head
        answer.size = _ANSWER_BYTES + len(head.body) + len(head.request_name) + len(head.key)
        answer.touched_s = now_s
        if answer.size > self._max_answer_bytes:
            raise AnswerTooLarge
        self.size += answer.size
        self._answers[head.answer_id] = answer
        holding = self._by_tenant.setdefault(head.tenant, _Holding())
        holding.size += answer.size
        holding.answers[head.answer_id] = answer
        if head.key:
            self._by_key[head.tenant, head.key] = answer
        self._removed.pop(head.answer_id, None)
        if not self._make_room(answer):
            self.remove(answer, None)
            raise StoreFull

    def _make_room(self, for_answer: KeptAnswer) -> bool:
        """Remove answers without a client until the limits hold: of the tenant that holds most its oldest,
        and none of another tenant that holds less than that of `for_answer`, or at most an equal share.
        Return False if that is not enough."""
        own = for_answer.head.tenant
        removable: dict[str, Iterator[KeptAnswer]] = {}
        while (too_large := self.size > self._max_bytes) or len(self._answers) > MAX_ANSWERS:
            held = {
                tenant: holding.size if too_large else len(holding.answers)
                for tenant, holding in self._by_tenant.items()
            }
            limit = self._max_bytes if too_large else MAX_ANSWERS
            for tenant in sorted(held, key=held.__getitem__, reverse=True):
                if held[tenant] < held[own]:
                    return False
                if tenant != own and held[tenant] * len(held) <= limit:
                    # Whoever holds more cannot make room, because clients read it: that is not this tenant's
                    # fault.
                    continue
                if tenant not in removable:
                    answers = self._by_tenant[tenant].answers.values()
                    removable[tenant] = iter(
                        [one for one in answers if one is not for_answer and not one.client_connected]
                    )
                if (oldest := next(removable[tenant], None)) is not None:
                    self.remove(oldest, RemovalReason.NO_ROOM)
                    break
            else:
                return False
        return True

    def _add(self, answer: KeptAnswer, entries: Sequence[LogEntry], now_s: float) -> None:
        answer.entries += entries
        answer.tokens += sum(len(entry.token_ids) for entry in entries)
        self._resize(answer, sum(entry.size for entry in entries))
        self._touch(answer, now_s)

    def _truncate(self, answer: KeptAnswer, entries: int) -> None:
        dropped = answer.entries[entries:]
        del answer.entries[entries:]
        answer.tokens -= sum(len(entry.token_ids) for entry in dropped)
        self._resize(answer, -sum(entry.size for entry in dropped))

    def _resize(self, answer: KeptAnswer, by: int) -> None:
        answer.size += by
        self.size += by
        self._by_tenant[answer.head.tenant].size += by

    def _touch(self, answer: KeptAnswer, now_s: float) -> None:
        answer.touched_s = now_s
        if not answer.removed:
            self._answers.move_to_end(answer.head.answer_id)
            self._by_tenant[answer.head.tenant].answers.move_to_end(answer.head.answer_id)


def _is_copy_of(answer: KeptAnswer, part: Part) -> bool:
    """Return whether the answer here is a copy of the part's answer, given equal run numbers."""
    return not answer.served_here and answer.frontend_id == part.frontend_id
