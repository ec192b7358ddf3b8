"""The table of live streams, and the rule that decides which token is accepted into which stream.

Pure: no I/O and no clock, so that tests can drive it through every order of events. A token has the identity
(request, epoch, index). It is accepted if and only if its request is live, the instance that sent it owns the
request, its epoch is the request's current one, and its index is the next one.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tailrace.cluster import Phase
from tailrace.output_flags import OutputFlag
from tailrace.v1 import worker_pb2

# As plain integers: they are compared for every output.
FINISHED: Final = int(OutputFlag.FINISHED)
PREFILL_DONE: Final = int(OutputFlag.PREFILL_DONE)
REASONING_ENDED: Final = int(OutputFlag.REASONING_ENDED)
FAILED: Final = int(OutputFlag.FAILED)
ANSWER_BEGUN: Final = int(OutputFlag.ANSWER_BEGUN)


class Requirements(NamedTuple):
    """What a request requires of an instance besides the model."""

    # False for a pooling request.
    generates: bool = True
    # Whether the request names a LoRA adapter.
    adapter: bool = False


TEXT_GENERATION: Final = Requirements()


class Reject(enum.Enum):
    """Why an entry was not accepted."""

    # The request has finished or was aborted while these outputs were in flight.
    UNKNOWN = "unknown"
    NOT_OWNER = "not_owner"
    STALE_EPOCH = "stale_epoch"
    # The owner sent an index other than the next one.
    INDEX = "index"
    # The owner's engine gave the request up.
    FAILED = "failed"


class MalformedStep(Exception):
    """The columns of one message do not match; nothing of it was accepted."""


@dataclass(slots=True, eq=False)
class Stream:
    """One live request. `epoch` counts its handovers; `owner` is None while it is between instances."""

    handle: int
    # By which the fleet knows it (tailrace/request_ids.py).
    request_id: str
    # vLLM's EngineCoreRequest, under this id.
    frames: tuple[bytes, ...] = ()
    prompt_tokens: int = 0
    max_tokens: int = 0
    traceparent: str = ""
    owner: str | None = None
    epoch: int = 0
    # Key of the model that generates its tokens; no other model may continue it. Empty: unknown.
    model: str = ""
    # Accepted tokens; the next index is the length. Needed to continue on another instance.
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    phase: Phase = Phase.PREFILL
    # How often an instance gave it up.
    failures: int = 0
    # How often its outputs could not be sent because too much was unread.
    congested: int = 0
    # Since its last progress: how often its instance was lost, and how often because the engine died.
    losses: int = 0
    deaths: int = 0
    # Its number of tokens when its instance was last lost, and when it was placed on its current instance.
    tokens_at_loss: int = 0
    tokens_at_placement: int = 0
    # Whether the instance has confirmed that its engine has the request.
    engine_confirmed: bool = False
    # Whether an engine that it was taken from had it.
    left_engine: bool = False
    # Until this time its instance must not run a suspect of another front end; seconds as `arrived_s`.
    exclusive_until_s: float = 0.0
    # Seconds of the front end's monotonic clock.
    arrived_s: float = 0.0
    # When its current or last placement began.
    placing_since_s: float = 0.0
    # When the first token was accepted; None: not yet.
    first_token_s: float | None = None
    # When the reasoning ended; None: not yet, or it does not reason.
    reasoning_ended_s: float | None = None
    # When the first answering token was accepted, and its index; None: not yet.
    first_answer_s: float | None = None
    first_answer_index: int = 0
    # Epoch and number of tokens when progress was last observed (liveness.py), when that was, and how many
    # steps its instance had finished then.
    last_progress: tuple[int, int] = (-1, -1)
    last_progress_s: float = 0.0
    last_progress_step: int = 0
    # Seconds per token at which its answer is shown; 0: as soon as it is made; None: as the policy says that
    # places it.
    pace_s: float | None = None
    # What its instance must support.
    requirements: Requirements = TEXT_GENERATION
    # Version of the named adapter on arrival; empty: no adapter, or unknown.
    adapter_version: str = ""
    # By which the API server knows it.
    name: str = ""

    @property
    def accepted(self) -> int:
        """Return the number of accepted tokens, which is the index of the next one."""
        return len(self.token_ids)

    @property
    def reached_engine(self) -> bool:
        """Return whether the engine that the stream was last submitted to ever had it.

        The engine may have been dead by then: what ends a machine ends all of its engines, which is noticed
        of one after the other.
        """
        return self.engine_confirmed or self.accepted > self.tokens_at_placement


@dataclass(slots=True)
class StepVerdict:
    """The verdict on one step's entries."""

    tokens: int = 0
    # Which entries were accepted. None: all of them, and the message can be forwarded as it is.
    keep: list[bool] | None = None
    # Streams that entered a phase for the first time or ended, with those flags.
    flagged: list[tuple[Stream, int]] = field(default_factory=list)
    rejected: list[tuple[int, Reject]] = field(default_factory=list)
    # Streams that their owner gave up in this step; they have no owner now.
    failed: list[Stream] = field(default_factory=list)


class StreamTable:
    """Hold all live streams of one front end."""

    def __init__(self, after_prefill: Phase = Phase.REASONING) -> None:
        """`after_prefill`: ANSWERING if no reasoning parser is set.

        With a parser, a request that does not reason ends its reasoning with its first token.
        """
        self._after_prefill = after_prefill
        self._streams: dict[int, Stream] = {}
        self._by_name: dict[str, Stream] = {}
        # Live streams by owner and handle; an instance without any is not in it.
        self._by_owner: dict[str, dict[int, Stream]] = {}
        self._last_handle = 0

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        return iter(list(self._streams.values()))

    def get(self, handle: int) -> Stream | None:
        """Return the live stream with this handle, or None."""
        return self._streams.get(handle)

    def find(self, name: str) -> Stream | None:
        """Return the live stream of the request with this name, or None."""
        return self._by_name.get(name)

    def count_owned(self, instance_id: str) -> int:
        """Return how many live streams the instance owns, in constant time."""
        return len(self._by_owner.get(instance_id, ()))

    @property
    def placed(self) -> int:
        """Return how many live streams an instance owns."""
        return sum(map(len, self._by_owner.values()))

    def is_live(self, stream: Stream) -> bool:
        """Return whether the stream has neither finished nor been closed."""
        return self._streams.get(stream.handle) is stream

    def open(
        self,
        request_id: str,
        frames: Iterable[bytes] = (),
        prompt_tokens: int = 0,
        max_tokens: int = 0,
        arrived_s: float = 0.0,
        name: str = "",
    ) -> Stream:
        """Open a new stream at epoch 0, without an owner. Raise ValueError if the request is already known.

        `name`: the API server's; empty: the same.
        """
        name = name or request_id
        if name in self._by_name:
            raise ValueError(f"request {request_id}: its name is in use")
        stream = Stream(
            self._next_handle(),
            request_id,
            tuple(frames),
            prompt_tokens,
            max_tokens,
            arrived_s=arrived_s,
            name=name,
        )
        self._streams[stream.handle] = stream
        self._by_name[name] = stream
        return stream

    def restore(self, stream: Stream, token_ids: Iterable[int], flags: int, model: str) -> None:
        """Continue a new stream with the tokens of an earlier one of the same request.

        `flags`: all flags of the earlier stream; `model`: key of the model that generated the tokens.
        """
        stream.token_ids.extend(token_ids)
        stream.model = model
        if flags & PREFILL_DONE:
            stream.phase = self._after_prefill
        if flags & REASONING_ENDED and stream.phase is Phase.REASONING:
            stream.phase = Phase.ANSWERING

    def close(self, stream: Stream) -> None:
        """Remove the stream; later outputs for it are rejected. Closing twice is allowed."""
        if self.is_live(stream):
            del self._streams[stream.handle]
            del self._by_name[stream.name]
            self._forget_owner(stream)

    def assign(self, stream: Stream, instance_id: str) -> None:
        """Make the instance the owner, at the stream's current epoch. Raise ValueError if the stream has an
        owner."""
        if stream.owner is not None:
            raise ValueError(f"stream {stream.handle} is owned by {stream.owner}")
        self._set_owner(stream, instance_id)

    def orphan(self, stream: Stream) -> None:
        """Take the stream from its owner: outputs of the old epoch are not accepted any more."""
        self._forget_owner(stream)
        stream.left_engine = stream.left_engine or stream.reached_engine
        stream.owner = None
        stream.epoch += 1

    def orphan_failed(self, stream: Stream) -> None:
        """Take the stream from an owner that cannot continue it, and count the failure."""
        self.orphan(stream)
        stream.failures += 1

    def orphan_all(self, instance_id: str) -> list[Stream]:
        """Take all streams from an instance that was lost; return them."""
        lost = list(self._by_owner.get(instance_id, {}).values())
        for stream in lost:
            self.orphan(stream)
        return lost

    def hand_over(self, stream: Stream, instance_id: str, epoch: int) -> None:
        """Commit a migration: change owner and epoch in one step."""
        self._forget_owner(stream)
        self._set_owner(stream, instance_id)
        stream.epoch = epoch
        stream.engine_confirmed = True

    def confirm_on_engine(self, instance_id: str, handle: int, epoch: int) -> None:
        """Record that the instance's engine has the stream."""
        stream = self._streams.get(handle)
        if stream is not None and stream.owner == instance_id and stream.epoch == epoch:
            stream.engine_confirmed = True

    def accept(self, instance_id: str, step: worker_pb2.StepOutputs) -> StepVerdict:
        """Judge one step's entries and append the accepted tokens. Raise MalformedStep."""
        # Iterating over protobuf's repeated fields is slow; over lists it is not.
        handles, epochs, firsts = list(step.handles), list(step.epochs), list(step.first_indices)
        counts, flags, token_ids = list(step.counts), list(step.flags), list(step.token_ids)
        if not len(handles) == len(epochs) == len(firsts) == len(counts) == len(flags):
            raise MalformedStep("columns of different lengths")
        if sum(counts) != len(token_ids):
            raise MalformedStep(f"{sum(counts)} tokens announced, {len(token_ids)} sent")
        streams = self._streams
        verdict = StepVerdict()
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
                    self._apply_flags(stream, flag, verdict)
            else:
                self._reject(handle, stream, instance_id, epochs[position], flag, verdict)
                if verdict.keep is None:
                    verdict.keep = [True] * len(handles)
                verdict.keep[position] = False
            offset += count
        return verdict

    def _set_owner(self, stream: Stream, instance_id: str) -> None:
        stream.owner = instance_id
        stream.tokens_at_placement = stream.accepted
        stream.engine_confirmed = False
        self._by_owner.setdefault(instance_id, {})[stream.handle] = stream

    def _forget_owner(self, stream: Stream) -> None:
        """Remove the stream from its owner's index; `stream.owner` itself stays as it is."""
        if stream.owner is None:
            return
        owned = self._by_owner.get(stream.owner)
        if owned is not None and owned.pop(stream.handle, None) is not None and not owned:
            del self._by_owner[stream.owner]

    def _apply_flags(self, stream: Stream, flags: int, verdict: StepVerdict) -> None:
        new_flags = flags & (FINISHED | ANSWER_BEGUN)
        # A recomputed request reports the same transitions again.
        if flags & PREFILL_DONE and stream.phase is Phase.PREFILL:
            stream.phase = self._after_prefill
            new_flags |= PREFILL_DONE
        if flags & REASONING_ENDED and stream.phase is Phase.REASONING:
            stream.phase = Phase.ANSWERING
            new_flags |= REASONING_ENDED
        if new_flags:
            verdict.flagged.append((stream, new_flags))
        if flags & FINISHED:
            self.close(stream)

    def _reject(
        self,
        handle: int,
        stream: Stream | None,
        instance_id: str,
        epoch: int,
        flags: int,
        verdict: StepVerdict,
    ) -> None:
        reason = Reject.INDEX
        if stream is None:
            reason = Reject.UNKNOWN
        elif stream.owner != instance_id:
            reason = Reject.NOT_OWNER
        elif stream.epoch != epoch:
            reason = Reject.STALE_EPOCH
        else:
            # From the owner, in its own epoch: it gave up, or lost or repeated a token, and cannot continue.
            reason = Reject.FAILED if flags & FAILED else Reject.INDEX
            self.orphan_failed(stream)
            verdict.failed.append(stream)
        verdict.rejected.append((handle, reason))

    def _next_handle(self) -> int:
        """Return an unused unsigned 32-bit handle; 0 is never one."""
        handle = self._last_handle
        while True:
            handle = handle % 0xFFFFFFFF + 1
            if handle not in self._streams:
                self._last_handle = handle
                return handle
