"""The table of live streams, and the rule that decides which token is accepted into which.

Pure: no I/O and no clock, so that a test can drive it through every order of events. A token has the identity
(request, epoch, index). It is accepted if and only if its request is live, the instance that sent it owns the
request, its epoch is the request's current one, and its index is the next one.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from tailrace.cluster import Phase

FINISHED = 1
PREFILL_DONE = 2
REASONING_ENDED = 4
FAILED = 8


class Columns(Protocol):
    """What tailrace.v1.StepOutputs says beside its payload: one entry a request; token ids concatenated."""

    @property
    def handles(self) -> Sequence[int]: ...
    @property
    def epochs(self) -> Sequence[int]: ...
    @property
    def first_indices(self) -> Sequence[int]: ...
    @property
    def counts(self) -> Sequence[int]: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def flags(self) -> Sequence[int]: ...


class Needs(NamedTuple):
    """What a request asks of an instance beside the model."""

    # False: a pooling request.
    generates: bool = True
    # It names a LoRA adapter.
    adapter: bool = False


TEXT: Final = Needs()


class Reject(enum.Enum):
    """Why an entry was not accepted."""

    # Finished or aborted; its last outputs were on their way.
    UNKNOWN = "unknown"
    NOT_OWNER = "not_owner"
    STALE_EPOCH = "stale_epoch"
    # The owner sent another index than the next one.
    INDEX = "index"
    # The owner's engine gave the request up.
    FAILED = "failed"


class MalformedStep(Exception):
    """The columns of one message do not fit each other; nothing of it was accepted."""


@dataclass(slots=True, eq=False)
class Stream:
    """One live request. `epoch` counts its handovers; `owner` is None while it is between instances."""

    handle: int
    request_id: str
    # vLLM's EngineCoreRequest, verbatim.
    frames: tuple[bytes, ...] = ()
    prompt_tokens: int = 0
    max_tokens: int = 0
    traceparent: str = ""
    owner: str | None = None
    epoch: int = 0
    # Key of the model that makes its tokens: no other may go on with them. Empty: not known.
    model: str = ""
    # Accepted so far; the next index is its length. Needed to go on elsewhere.
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    phase: Phase = Phase.PREFILL
    # How often an instance failed it.
    failures: int = 0
    # Since it last got on: how often its instance was lost, and how often because the engine died.
    losses: int = 0
    deaths: int = 0
    # Its length when its instance was last lost, and when it came to its instance.
    lost_at: int = 0
    placed_at: int = 0
    # Its instance has said that its engine has it.
    taken: bool = False
    # Until when an instance must not have a suspect of another front end beside it; seconds as `arrived_s`.
    alone_until_s: float = 0.0
    # Seconds of the front end's monotonic clock.
    arrived_s: float = 0.0
    # Since when it is between instances, or when it last was.
    placing_since_s: float = 0.0
    # When the first token was accepted; None: there is none yet.
    first_token_s: float | None = None
    # When the first answering token was accepted, and its index; None: there is none yet.
    first_answer_s: float | None = None
    first_answer_index: int = 0
    # Its epoch and length when it was last seen to have got on, and when that was.
    seen: tuple[int, int] = (-1, -1)
    seen_s: float = 0.0
    # Seconds a token at which its answer is shown; 0: as soon as it is made.
    pace_s: float = 0.0
    # What its instance must be able to do.
    needs: Needs = TEXT
    # Of the adapter that it names, when it came; empty: it names none, or that is not known.
    adapter_version: str = ""

    @property
    def accepted(self) -> int:
        """Tokens accepted; the index of the next one."""
        return len(self.token_ids)

    @property
    def was_there(self) -> bool:
        """Whether the engine that it was last given to ever had it: that may have been dead by then. What
        ends a machine ends all of its engines, and is noticed of one after the other."""
        return self.taken or self.accepted > self.placed_at


@dataclass(slots=True)
class Accepted:
    """The verdict on one step's entries."""

    tokens: int = 0
    # None: all entries were accepted and the message can be forwarded as it is.
    keep: list[bool] | None = None
    # Accepted entries that changed something: phases entered for the first time, ends.
    flagged: list[tuple[Stream, int]] = field(default_factory=list)
    rejected: list[tuple[int, Reject]] = field(default_factory=list)
    # Streams whose owner failed them in this step; orphaned.
    failed: list[Stream] = field(default_factory=list)


class StreamTable:
    """All live streams of one front end."""

    def __init__(self, after_prefill: Phase = Phase.REASONING) -> None:
        """`after_prefill`: ANSWERING where no reasoning parser is set. A request that does not reason though
        there is one ends its reasoning with its first token."""
        self._after_prefill = after_prefill
        self._streams: dict[int, Stream] = {}
        self._by_request: dict[str, Stream] = {}
        # Live streams by owner and handle; an instance without any is not in it.
        self._by_owner: dict[str, dict[int, Stream]] = {}
        self._last_handle = 0

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        return iter(list(self._streams.values()))

    def get(self, handle: int) -> Stream | None:
        """The live stream with this handle."""
        return self._streams.get(handle)

    def find(self, request_id: str) -> Stream | None:
        """The live stream of this request."""
        return self._by_request.get(request_id)

    def count_owned(self, instance_id: str) -> int:
        """How many live streams the instance owns; costs the same however many there are."""
        return len(self._by_owner.get(instance_id, ()))

    def is_live(self, stream: Stream) -> bool:
        """Whether the stream has neither finished nor been closed."""
        return self._streams.get(stream.handle) is stream

    def open(
        self,
        request_id: str,
        frames: Iterable[bytes] = (),
        prompt_tokens: int = 0,
        max_tokens: int = 0,
        arrived_s: float = 0.0,
    ) -> Stream:
        """A new stream, at epoch 0 and without an owner. Raises ValueError when the id is in use."""
        if request_id in self._by_request:
            raise ValueError(f"request id {request_id} is in use")
        stream = Stream(
            self._next_handle(), request_id, tuple(frames), prompt_tokens, max_tokens, arrived_s=arrived_s
        )
        self._streams[stream.handle] = stream
        self._by_request[request_id] = stream
        return stream

    def restore(self, stream: Stream, token_ids: Iterable[int], flags: int, model: str) -> None:
        """A new stream goes on with what an earlier one of the same request had got. `flags`: all of them;
        `model`: the key of the model that made the tokens."""
        stream.token_ids.extend(token_ids)
        stream.model = model
        if flags & PREFILL_DONE:
            stream.phase = self._after_prefill
        if flags & REASONING_ENDED and stream.phase is Phase.REASONING:
            stream.phase = Phase.ANSWERING

    def close(self, stream: Stream) -> None:
        """Forget the stream; whatever is still sent for it is rejected. Closing twice is allowed."""
        if self.is_live(stream):
            del self._streams[stream.handle]
            del self._by_request[stream.request_id]
            self._forget_owner(stream)

    def assign(self, stream: Stream, instance_id: str) -> None:
        """The instance owns the stream from now on, at its current epoch. Only for an orphan."""
        if stream.owner is not None:
            raise ValueError(f"stream {stream.handle} is owned by {stream.owner}")
        self._set_owner(stream, instance_id)

    def orphan(self, stream: Stream) -> None:
        """Take the stream from its owner: nothing sent before this moment's epoch counts any more."""
        self._forget_owner(stream)
        stream.owner = None
        stream.epoch += 1

    def fail(self, stream: Stream) -> None:
        """The owner cannot go on with the stream: take it from it, and count that."""
        self.orphan(stream)
        stream.failures += 1

    def orphan_all(self, instance_id: str) -> list[Stream]:
        """The instance is lost: take everything from it."""
        lost = list(self._by_owner.get(instance_id, {}).values())
        for stream in lost:
            self.orphan(stream)
        return lost

    def hand_over(self, stream: Stream, instance_id: str, epoch: int) -> None:
        """Commit of a migration: owner and epoch change in one step."""
        self._forget_owner(stream)
        self._set_owner(stream, instance_id)
        stream.epoch = epoch
        stream.taken = True

    def note_taken(self, instance_id: str, handle: int, epoch: int) -> None:
        """The instance says that its engine has the stream."""
        stream = self._streams.get(handle)
        if stream is not None and stream.owner == instance_id and stream.epoch == epoch:
            stream.taken = True

    def accept(self, instance_id: str, step: Columns) -> Accepted:
        """Judge one step's entries and take in what is good. Raises MalformedStep."""
        # Repeated fields of protobuf are slow to walk; as lists they are not.
        handles, epochs, firsts = list(step.handles), list(step.epochs), list(step.first_indices)
        counts, flags, token_ids = list(step.counts), list(step.flags), list(step.token_ids)
        if not len(handles) == len(epochs) == len(firsts) == len(counts) == len(flags):
            raise MalformedStep("columns of different lengths")
        if sum(counts) != len(token_ids):
            raise MalformedStep(f"{sum(counts)} tokens announced, {len(token_ids)} sent")
        streams = self._streams
        verdict = Accepted()
        offset = 0
        for position, handle in enumerate(handles):
            stream = streams.get(handle)
            count, flag = counts[position], flags[position]
            if (
                stream is not None
                and stream.owner == instance_id
                and stream.epoch == epochs[position]
                and len(stream.token_ids) == firsts[position]
                and not flag & FAILED
            ):
                if count == 1:
                    stream.token_ids.append(token_ids[offset])
                else:
                    stream.token_ids.extend(token_ids[offset : offset + count])
                verdict.tokens += count
                if flag:
                    self._note(stream, flag, verdict)
            else:
                self._reject(handle, stream, instance_id, epochs[position], flag, verdict)
                if verdict.keep is None:
                    verdict.keep = [True] * len(handles)
                verdict.keep[position] = False
            offset += count
        return verdict

    def _set_owner(self, stream: Stream, instance_id: str) -> None:
        stream.owner = instance_id
        stream.placed_at = stream.accepted
        stream.taken = False
        self._by_owner.setdefault(instance_id, {})[stream.handle] = stream

    def _forget_owner(self, stream: Stream) -> None:
        """Of a stream that its owner loses, or that ends; the field itself stays as it is."""
        if stream.owner is None:
            return
        owned = self._by_owner.get(stream.owner)
        if owned is not None and owned.pop(stream.handle, None) is not None and not owned:
            del self._by_owner[stream.owner]

    def _note(self, stream: Stream, flags: int, verdict: Accepted) -> None:
        news = flags & FINISHED
        # A recomputed request shows the same transitions again.
        if flags & PREFILL_DONE and stream.phase is Phase.PREFILL:
            stream.phase = self._after_prefill
            news |= PREFILL_DONE
        if flags & REASONING_ENDED and stream.phase is Phase.REASONING:
            stream.phase = Phase.ANSWERING
            news |= REASONING_ENDED
        if news:
            verdict.flagged.append((stream, news))
        if flags & FINISHED:
            self.close(stream)

    def _reject(
        self,
        handle: int,
        stream: Stream | None,
        instance_id: str,
        epoch: int,
        flags: int,
        verdict: Accepted,
    ) -> None:
        reason = Reject.INDEX
        if stream is None:
            reason = Reject.UNKNOWN
        elif stream.owner != instance_id:
            reason = Reject.NOT_OWNER
        elif stream.epoch != epoch:
            reason = Reject.STALE_EPOCH
        else:
            # From the owner, in its own epoch: it gave up, or lost or repeated a token. It cannot go on.
            reason = Reject.FAILED if flags & FAILED else Reject.INDEX
            self.fail(stream)
            verdict.failed.append(stream)
        verdict.rejected.append((handle, reason))

    def _next_handle(self) -> int:
        """Unsigned 32 bits, not in use; 0 is never one."""
        handle = self._last_handle
        while True:
            handle = handle % 0xFFFFFFFF + 1
            if handle not in self._streams:
                self._last_handle = handle
                return handle
