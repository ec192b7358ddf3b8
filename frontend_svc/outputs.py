"""The way of outputs to the API server: `Outputs.forward` sends what was accepted of a step.

Each output passes a chain: into the log of a kept answer (answers/), which gives it back once a second front
end has it too; through the pacer, which holds back what users would not read yet (pacing.py); to the API
server under its own name of the request (`Names`). A step of which nothing is kept, paced or rejected is
sent as it came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate

import msgspec

from frontend_svc.admission import Refusal
from frontend_svc.answers.calls import METHODS
from frontend_svc.answers.coordinator import AnswerCoordinator, RunRequest
from frontend_svc.pacing import Pacer
from frontend_svc.streams import FINISHED, PREFILL_DONE, StepVerdict, Stream
from tailrace.cluster import Phase
from tailrace.telemetry.incidents import unreadable
from tailrace.v1 import worker_pb2
from tailrace.wire.outputs import (
    EngineCoreOutput,
    FinishReason,
    encode_outputs,
    filter_outputs,
    rename_outputs,
    split_outputs,
    without_statistics,
)
from tailrace.wire.readable import check_outputs
from tailrace.wire.requests import UtilityCall


class NamedOutput:
    """Send outputs to the API server under its own names of the requests.

    vLLM's Python API server already uses the fleet's ids (frontend_svc/api_server/engine_client.py), so there
    is nothing to do; vLLM's Rust API server puts what a client chose into the ids that it sends.
    """

    def __init__(self, send: Callable[[Sequence[bytes]], None], unread_bytes: Callable[[], int]) -> None:
        """`send` sends one message of vLLM's engine-core protocol."""
        self._send = send
        self._unread_bytes = unread_bytes
        self._names: dict[str, str] = {}

    @property
    def unread_bytes(self) -> int:
        """Return how many bytes wait for the API server."""
        return self._unread_bytes()

    @property
    def names(self) -> set[str]:
        """Return the fleet's ids of the requests that have a name."""
        return set(self._names)

    def add(self, request_id: str, name: str) -> None:
        """Call a request by this name until its last output has been sent."""
        self._names[request_id] = name

    def drop(self, request_id: str) -> None:
        """Forget the name of a request that gets no more outputs."""
        self._names.pop(request_id, None)

    def send(self, frames: Sequence[bytes]) -> None:
        """Send one message. Raise msgspec.DecodeError if there are names and it is not readable."""
        self._send(rename_outputs(frames, self._names) if self._names else frames)


class Unsent(Exception):
    """Some accepted outputs of a step cannot be read, and were not sent; the others were."""

    def __init__(self, unsent: list[bool], error: Exception) -> None:
        """`unsent`: which entries of the step."""
        super().__init__(str(error))
        self.unsent = unsent


class Outputs:
    """Send outputs, errors and kept answers of one front end to its API server."""

    def __init__(self, output: NamedOutput, pacer: Pacer, answers: AnswerCoordinator | None) -> None:
        """`answers`: None if no answers are kept."""
        self._output = output
        self._pacer = pacer
        self._answers = answers

    @property
    def unread_bytes(self) -> int:
        """Return how many bytes the API server has not read."""
        return self._output.unread_bytes

    @property
    def keeps_answers(self) -> bool:
        """Return whether clients whose front end ends get the rest of their answers from another one."""
        return self._answers is not None

    # ---- a step

    def forward(self, instance_id: str, step: worker_pb2.StepOutputs, verdict: StepVerdict) -> None:
        """Send the accepted outputs of an instance's step, and begin to pace the answers that begin with it.

        Raise Unsent, or whatever the instance's bytes lead to if none can be read.
        """
        frames, keep = list(step.frames), verdict.keep
        unsent: Unsent | None = None
        if keep is None or any(keep):
            if keep is not None:
                frames = filter_outputs(frames, keep)
            try:
                frames = _readable(instance_id, frames)
            except msgspec.DecodeError as error:
                accepted = keep or [True] * len(step.handles)
                frames, keep = _only_readable(instance_id, frames, accepted)
                unsent = Unsent([one and not sent for one, sent in zip(accepted, keep, strict=True)], error)
            if keep is None or any(keep):
                if self._pacer or self._answers:
                    self._deliver_apart(frames, step, keep)
                else:
                    self._output.send(frames)
        for stream, flags in verdict.flagged:
            if stream.pace_s and stream.phase is Phase.ANSWERING and not flags & FINISHED:
                # Without reasoning, the first token already belongs to the answer and has just been sent.
                self._pacer.begin(stream, 1 if flags & PREFILL_DONE else 0)
        if unsent is not None:
            raise unsent

    def _deliver_apart(
        self, frames: list[bytes], step: worker_pb2.StepOutputs, keep: list[bool] | None
    ) -> None:
        """Send a step's outputs together, but for those that are kept or paced."""
        handles, counts, flags = list(step.handles), list(step.counts), list(step.flags)
        accepted = [entry for entry in range(len(handles)) if keep is None or keep[entry]]
        apart = [at for at, entry in enumerate(accepted) if self._goes_apart(handles[entry])]
        together, messages = split_outputs(frames, apart) if apart else (frames, [])
        if len(apart) < len(accepted):
            self._output.send(together)
        ends = list(accumulate(counts)) if apart else []
        for at, message in zip(apart, messages, strict=True):
            entry = accepted[at]
            token_ids = step.token_ids[ends[entry] - counts[entry] : ends[entry]]
            self._deliver(handles[entry], message, token_ids, flags[entry])

    def _goes_apart(self, handle: int) -> bool:
        return self._pacer.is_paced(handle) or (self._answers is not None and self._answers.is_kept(handle))

    def _deliver(self, handle: int, frames: Sequence[bytes], token_ids: Sequence[int], flags: int) -> None:
        if self._answers is not None and self._answers.is_kept(handle):
            # It comes back by `send_output`.
            self._answers.append_output(handle, frames, list(token_ids), flags)
        else:
            self.send_output(handle, frames, len(token_ids), bool(flags & FINISHED))

    # ---- other messages

    def send_output(self, handle: int, frames: Sequence[bytes], tokens: int, last: bool) -> None:
        """Send one output when it is due; `handle` 0: no stream carries it."""
        self._pacer.put(handle, frames, tokens, last)

    def send_error(self, request_id: str, refusal: Refusal) -> None:
        """End a request that has no stream with an error."""
        self._output.send(_error(request_id, refusal))

    def reply(self, frames: Sequence[bytes]) -> None:
        """Send a utility call's result."""
        self._output.send(frames)

    def handle_call(self, call: UtilityCall) -> bool:
        """Handle a call of the API server about kept answers; return False if it is another one."""
        if self._answers is None or call.method not in METHODS:
            return False
        self._answers.handle_call(call)
        return True

    # ---- a stream's begin and end

    def join_run(self, run: str | None, request_id: str) -> RunRequest | Refusal | None:
        """Register an engine request with this run of a kept answer; None if it belongs to none."""
        return None if self._answers is None or run is None else self._answers.join_run(run, request_id)

    def deliver_run(self, run_request: RunRequest) -> None:
        """Send what the log of a kept answer already has for this request."""
        if self._answers is not None:
            self._answers.deliver(run_request)

    def begin(self, stream: Stream) -> None:
        """Use the API server's name of a new stream."""
        if stream.name != stream.request_id:
            self._output.add(stream.request_id, stream.name)

    def resume(self, stream: Stream, run_request: RunRequest) -> None:
        """Send what there is of a kept answer; the stream makes what is missing."""
        if self._answers is not None:
            self._answers.deliver(run_request)
            self._answers.attach_stream(stream, run_request)
        if stream.phase is Phase.ANSWERING:
            self._pacer.begin(stream, 0)

    def end(self, stream: Stream, refusal: Refusal) -> None:
        """End a stream with an error, after what is held back of it."""
        if self._answers is not None:
            self._answers.stream_ended(stream.handle)
        self._pacer.put(stream.handle, _error(stream.request_id, refusal), 0, True)

    def aborted(self, stream: Stream) -> None:
        """Forget a stream that no client reads any more."""
        self._output.drop(stream.request_id)
        if self._answers is not None:
            self._answers.stream_ended(stream.handle)

    def drop(self, name: str) -> None:
        """Discard what is held back of the request with this name."""
        request_id = self._pacer.drop(name)
        if request_id is not None:
            # Its last output, with which the name goes, may have been among them.
            self._output.drop(request_id)

    def forbid_resume(self, stream: Stream) -> None:
        """Make sure that no client can resume this stream's answer."""
        if self._answers is not None:
            self._answers.stream_failed(stream.handle)

    # ---- periodic

    def instance_heard(self) -> None:
        """Note that an instance sent outputs, of any stream."""
        if self._answers is not None:
            self._answers.instance_heard()

    def tick(self) -> None:
        """Expire kept answers. Called every half second."""
        if self._answers is not None:
            self._answers.tick()

    async def close(self) -> None:
        """Discard what is held back."""
        self._pacer.close()
        if self._answers is not None:
            await self._answers.close()


def _readable(instance_id: str, frames: list[bytes]) -> list[bytes]:
    """Return a worker's outputs as API servers can read them, if need be without its statistics.

    Raise msgspec.DecodeError if they cannot be read otherwise either.
    """
    try:
        check_outputs(frames)
    except msgspec.DecodeError as error:
        frames = without_statistics(frames)
        check_outputs(frames)
        unreadable("outputs of a worker", instance_id, f"statistics: {error}")
    return frames


def _only_readable(
    instance_id: str, frames: list[bytes], keep: Sequence[bool]
) -> tuple[list[bytes], list[bool]]:
    """Return those outputs that can be read, each by itself, and which entries of the step they are.

    `frames`: what `keep` allows of a step, and cannot be read together. Raise msgspec.DecodeError or
    ValueError if its outputs cannot be told apart.
    """
    entries = [entry for entry, kept in enumerate(keep) if kept]
    readable = [False] * len(keep)
    try:
        _, messages = split_outputs(frames, range(len(entries)))
    except IndexError as error:
        raise ValueError(f"fewer than {len(entries)} outputs") from error
    for entry, message in zip(entries, messages, strict=True):
        with suppress(msgspec.DecodeError):
            _readable(instance_id, message)
            readable[entry] = True
    frames = filter_outputs(frames, [readable[entry] for entry in entries])
    return _readable(instance_id, frames) if any(readable) else frames, readable


def _error(request_id: str, refusal: Refusal) -> list[bytes]:
    """Encode a message that ends a request with an error."""
    error = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, stop_reason=refusal.encode())
    return encode_outputs([error], [request_id])
