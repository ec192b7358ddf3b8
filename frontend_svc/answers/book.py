"""The log of each answer, and the rules by which it grows, moves and is forgotten.

Pure: no I/O and no clock, so that a test can drive it through every order of events.

An answer is one HTTP request and the log of what engines gave for it. One front end *serves* it; a second
one has a *copy*, which is a prefix of the log. Whoever resumes it begins the next *run*: the request is run
again, the log is told to vLLM's API server anew, and what is missing is generated. A run ends when the next
one begins: nothing of an earlier run enters the log any more, wherever it comes from. Front ends that do not
reach each other may both begin one: the numbers of runs are drawn, so that theirs are not the same.
"""

from __future__ import annotations

import enum
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

# What an answer and an entry take beside their contents, in bytes.
_ANSWER_BYTES: Final = 1024
_ENTRY_BYTES: Final = 240
# However much all may have: an answer goes to another front end in one message.
_LONGEST: Final = 64 << 20
# Forgotten answers that are still told from unknown ones.
_REMEMBERED: Final = 16_384
# Of one answer: runs of which it is known how they ended.
_RUNS_MAX: Final = 256
MAX_ANSWERS: Final = 65_536
"""Answers that are kept at most, copies included."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a request is, and what of it has to be the same wherever it is run again."""

    answer_id: str
    # Empty: no keys are asked for.
    tenant: str
    # The client's Idempotency-Key; empty: it gave none.
    key: str
    path: str
    body: bytes
    # Of the body as a JSON value.
    digest: bytes
    # The X-Request-Id that it is run with.
    request_name: str
    # Seconds since the epoch.
    created_s: int
    streams: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """What one engine request of an answer got in one step; a note of the API server's has no part."""

    part: str
    token_ids: Sequence[int]
    # As in StepOutputs.
    flags: int
    # vLLM's EngineCoreOutputs with this output alone; of a note, the note.
    frames: tuple[bytes, ...]
    # Key of the model that made the part's tokens, in its first entry.
    model: str = ""

    @property
    def size(self) -> int:
        """Bytes, about."""
        return _ENTRY_BYTES + len(self.part) + 4 * len(self.token_ids) + sum(map(len, self.frames))


@dataclass(slots=True, eq=False)
class Answer:
    """One answer and its log."""

    head: Head
    # 1, then numbers that are drawn, each above the last; `ended`: of earlier runs, the tokens in the log
    # when they ended.
    run: int = 1
    ended: dict[int, int] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    tokens: int = 0
    # The API server has told all of it, or it is known to have ended.
    complete: bool = False
    # Served here; else a copy.
    serves: bool = True
    # Where it is served.
    frontend_id: str = ""
    # Somebody is connected and reads it.
    running: bool = False
    # Its key has been checked with others, where it has one.
    settled: bool = True
    # Not in the book any more: what it gets is not kept.
    gone: bool = False
    # When it last changed; seconds.
    touched_s: float = 0.0
    size: int = 0


class Forgotten(enum.Enum):
    """Why an answer that was here is not."""

    EXPIRED = "expired"
    # For the sake of others.
    NO_ROOM = "no_room"
    # It failed, and is not to be tried again.
    FAILED = "failed"


class Refused(enum.Enum):
    """Why a part of somebody else's answer is not taken in."""

    SUPERSEDED = "superseded"
    KEY_IN_USE = "key_in_use"
    FULL = "full"
    GAP = "gap"


class Full(Exception):
    """There is no room for another answer."""


class TooLarge(Full):
    """There never will be: its request alone is more than one answer may have."""


@dataclass(slots=True)
class Part:
    """A piece of an answer's log, on its way from one front end to another."""

    answer_id: str
    run: int
    head: Head | None
    ended: dict[int, int]
    first_entry: int
    entries: list[Entry]
    complete: bool
    frontend_id: str


def _next_run(run: int) -> int:
    return run + 1 + secrets.randbelow(1 << 32)


class AnswerBook:
    """All answers of one front end."""

    def __init__(
        self,
        frontend_id: str,
        max_bytes: int,
        rank: Callable[[str, str], int],
        next_run: Callable[[int], int] = _next_run,
    ) -> None:
        """`max_bytes`: of all logs; one may have an eighth of it, at most 64 MiB. `rank(key, frontend_id)`:
        of two front ends that were given a key at the same time the higher one has it; the same on all.
        `next_run(run)`: one greater than `run`, and another one at each front end."""
        self._frontend_id = frontend_id
        self._max_bytes = max_bytes
        self._longest = min(max_bytes // 8, _LONGEST)
        self._rank = rank
        self._next_run = next_run
        # Least recently touched first.
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._by_key: dict[tuple[str, str], Answer] = {}
        # With the tenant whose it was.
        self._forgotten: OrderedDict[str, tuple[str, Forgotten]] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._answers)

    def __iter__(self) -> Iterator[Answer]:
        return iter(list(self._answers.values()))

    def get(self, answer_id: str) -> Answer | None:
        """The answer of this id."""
        return self._answers.get(answer_id)

    def find(self, tenant: str, key: str) -> Answer | None:
        """The answer of the tenant's idempotency key."""
        return self._by_key.get((tenant, key))

    def forgotten(self, tenant: str, answer_id: str) -> Forgotten | None:
        """Why the tenant's answer is not here any more; None: it never was, or too long ago."""
        owner, why = self._forgotten.get(answer_id, ("", None))
        return why if owner == tenant else None

    # ---- served here

    def open(self, head: Head, now_s: float) -> Answer:
        """A new answer, served here, at its first run. Raises Full (TooLarge); ValueError when its id or key
        is in use."""
        if head.answer_id in self._answers or (head.key and (head.tenant, head.key) in self._by_key):
            raise ValueError(f"answer {head.answer_id}: its id or key is in use")
        answer = Answer(head, frontend_id=self._frontend_id, settled=not head.key)
        self._insert(answer, now_s)
        answer.running = True
        return answer

    def begin_run(self, answer: Answer, now_s: float) -> None:
        """Somebody resumes it here: what is served of it from now on is a new run."""
        self._end_current(answer)
        if not answer.serves:
            answer.serves = answer.settled = True
        answer.running = True
        answer.frontend_id = self._frontend_id
        self._touch(answer, now_s)

    def append(self, answer: Answer, entry: Entry, now_s: float) -> None:
        """The current run, served here, got this. An answer that has become too long is forgotten."""
        if answer.gone:
            return
        self._add(answer, [entry], now_s)
        if answer.size > self._longest or not self._make_room(answer):
            self.forget(answer, Forgotten.NO_ROOM)

    def end_run(self, answer: Answer, run: int, complete: bool, now_s: float) -> None:
        """Nobody is connected to this run any more. `complete`: it has been told to its end."""
        if answer.gone or run != answer.run:
            return
        answer.running = False
        answer.complete = answer.complete or complete
        self._touch(answer, now_s)

    def forget(self, answer: Answer, why: Forgotten | None) -> None:
        """It is not kept any more. None: as if it had never been."""
        if answer.gone:
            return
        answer.gone = True
        self.size -= answer.size
        del self._answers[answer.head.answer_id]
        if answer.head.key:
            del self._by_key[answer.head.tenant, answer.head.key]
        if why is not None:
            self._forgotten[answer.head.answer_id] = (answer.head.tenant, why)
            if len(self._forgotten) > _REMEMBERED:
                self._forgotten.popitem(last=False)

    # ---- between front ends

    def take(self, part: Part, now_s: float) -> Refused | Answer:
        """A front end that serves the answer tells what it has got. Told twice, it is taken once."""
        answer = self._answers.get(part.answer_id)
        if answer is None:
            if part.head is None or part.first_entry:
                # What had to make room is not asked for again: it would drive out the next one.
                _, why = self._forgotten.get(part.answer_id, ("", None))
                no_room = why is Forgotten.NO_ROOM
                return Refused.FULL if no_room else Refused.GAP
            made = self._take_new(part, part.head, now_s)
            if isinstance(made, Refused):
                return made
            answer = made
        elif part.run < answer.run or (part.run == answer.run and not _is_copy_of(answer, part)):
            return Refused.SUPERSEDED
        elif part.first_entry > len(answer.entries):
            return Refused.GAP
        if part.run > answer.run and part.first_entry < len(answer.entries):
            # Its log was taken over from a shorter copy than this one: what is beyond never was.
            self._cut(answer, part.first_entry)
        answer.run, answer.ended = part.run, dict(part.ended)
        answer.serves = answer.running = False
        answer.frontend_id = part.frontend_id
        self._add(answer, part.entries[len(answer.entries) - part.first_entry :], now_s)
        answer.complete = part.complete
        if answer.size > self._longest or not self._make_room(answer):
            self.forget(answer, Forgotten.NO_ROOM)
            return Refused.FULL
        return answer

    def hand_over(self, answer: Answer, frontend_id: str, now_s: float) -> Part:
        """Another front end serves it from now on; what stays here is a copy. Returns all of it."""
        self._end_current(answer)
        answer.serves = answer.running = False
        answer.frontend_id = frontend_id
        self._touch(answer, now_s)
        return self.part(answer, 0)

    def claim(self, part: Part, now_s: float) -> Answer | None:
        """Serve what another front end has handed over, at the run that began with that. None: a later run is
        known here, or there is no room."""
        answer = self._answers.get(part.answer_id)
        if answer is not None and answer.run >= part.run:
            return None
        if answer is not None:
            self.forget(answer, None)
        if part.head is None or self._with_key(part.head) is not None:
            return None
        answer = Answer(part.head, part.run, dict(part.ended), frontend_id=self._frontend_id)
        try:
            self._insert(answer, now_s)
        except Full:
            return None
        answer.running = True
        answer.complete = part.complete
        self._add(answer, part.entries, now_s)
        return answer

    def part(self, answer: Answer, first_entry: int, with_head: bool = True) -> Part:
        """What comes after `first_entry` entries."""
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

    def expire(self, now_s: float, keep_s: float) -> list[Answer]:
        """Forget what nobody has touched for `keep_s` seconds; returns it. What somebody reads here stays."""
        gone = []
        for answer in list(self._answers.values()):
            if now_s - answer.touched_s <= keep_s:
                break
            if answer.running:
                self._touch(answer, now_s)
                continue
            self.forget(answer, Forgotten.EXPIRED)
            gone.append(answer)
        return gone

    # ---- both

    def _end_current(self, answer: Answer) -> None:
        answer.ended[answer.run] = answer.tokens
        if len(answer.ended) > _RUNS_MAX:
            del answer.ended[min(answer.ended)]
        answer.run = self._next_run(answer.run)

    def _take_new(self, part: Part, head: Head, now_s: float) -> Refused | Answer:
        other = self._with_key(head)
        if other is not None:
            ours_first = self._rank(head.key, self._frontend_id) > self._rank(head.key, part.frontend_id)
            if other.settled or not other.serves or ours_first:
                return Refused.KEY_IN_USE
            # Both began at the same time; ours will find the other one.
            self.forget(other, None)
        answer = Answer(head, part.run, serves=False, frontend_id=part.frontend_id)
        try:
            self._insert(answer, now_s)
        except Full:
            return Refused.FULL
        return answer

    def _with_key(self, head: Head) -> Answer | None:
        return self._by_key.get((head.tenant, head.key)) if head.key else None

    def _insert(self, answer: Answer, now_s: float) -> None:
        head = answer.head
        answer.size = _ANSWER_BYTES + len(head.body) + len(head.request_name) + len(head.key)
        answer.touched_s = now_s
        if answer.size > self._longest:
            raise TooLarge
        self.size += answer.size
        self._answers[head.answer_id] = answer
        if head.key:
            self._by_key[head.tenant, head.key] = answer
        self._forgotten.pop(head.answer_id, None)
        if not self._make_room(answer):
            self.forget(answer, None)
            raise Full

    def _make_room(self, for_answer: Answer) -> bool:
        """Forget what is oldest and read by nobody; False: that is not enough."""
        if self.size <= self._max_bytes and len(self._answers) <= MAX_ANSWERS:
            return True
        for answer in list(self._answers.values()):
            if answer is not for_answer and not answer.running:
                self.forget(answer, Forgotten.NO_ROOM)
                if self.size <= self._max_bytes and len(self._answers) <= MAX_ANSWERS:
                    return True
        return False

    def _add(self, answer: Answer, entries: Sequence[Entry], now_s: float) -> None:
        answer.entries += entries
        answer.tokens += sum(len(entry.token_ids) for entry in entries)
        self._resize(answer, sum(entry.size for entry in entries))
        self._touch(answer, now_s)

    def _cut(self, answer: Answer, entries: int) -> None:
        dropped = answer.entries[entries:]
        del answer.entries[entries:]
        answer.tokens -= sum(len(entry.token_ids) for entry in dropped)
        self._resize(answer, -sum(entry.size for entry in dropped))

    def _resize(self, answer: Answer, by: int) -> None:
        answer.size += by
        self.size += by

    def _touch(self, answer: Answer, now_s: float) -> None:
        answer.touched_s = now_s
        if not answer.gone:
            self._answers.move_to_end(answer.head.answer_id)


def _is_copy_of(answer: Answer, part: Part) -> bool:
    """Whether what is here is a copy of what the part is from, if their runs are the same."""
    return not answer.serves and answer.frontend_id == part.frontend_id
