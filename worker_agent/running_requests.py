"""The requests on this worker, by the front ends' keys and by id."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tailrace.qoe import PacerState, TokenPacer, TokenRun
from tailrace.slo import READING_S
from tailrace.v1 import monitor_pb2, worker_pb2
from worker_agent.engine.base import RequestKey

# Track how a user can read an answer: pacer slack and QoE (tailrace/qoe.py).
#
# The worker knows when each token was generated, and policies see its reports. The front end knows more only
# when an instance is lost, and then includes it in its Submit. There is no work per token: the first
# answering token is timed exactly, the others are counted when a report is due and treated as evenly spaced
# since the previous count. Slack is exact; QoE does not see stalls shorter than a report's interval.


class AnswerPace:
    """Track one answer. Times in seconds of the monotonic clock; indices count output tokens."""

    __slots__ = ("_counted", "_pacer", "_sampled_s")

    def __init__(self, tpot_s: float) -> None:
        """`tpot_s`: the user's reading pace in seconds per token."""
        self._pacer = TokenPacer(tpot_s)
        # Output tokens counted so far, and when.
        self._counted = 0
        self._sampled_s = 0.0

    @property
    def begun(self) -> bool:
        """Return whether there is an answering token."""
        return self._pacer.ready > 0

    @property
    def qoe(self) -> float:
        """Return the QoE of the counted tokens, in (0, 1]."""
        return self._pacer.qoe()

    def answered(self, arrived_s: float, output_tokens: int) -> monitor_pb2.Answered:
        """Return how the counted tokens came, for a request that arrived at `arrived_s` on this clock; only
        after `begin`."""
        pacer = self._pacer
        gaps = pacer.ready - 1
        return monitor_pb2.Answered(
            ttft_s=max(0.0, pacer.first_s - arrived_s),
            tpot_s=(self._sampled_s - pacer.first_s) / gaps if gaps else 0.0,
            qoe=pacer.qoe(),
            reasoning_tokens=max(0, output_tokens - pacer.ready),
        )

    def begin(self, first_index: int, now_s: float) -> None:
        """Record the first answering token; later calls do nothing."""
        if not self.begun:
            self._pacer.add(TokenRun(now_s, 0.0, 1))
            self._counted, self._sampled_s = first_index + 1, now_s

    def count(self, output_tokens: int, now_s: float) -> None:
        """Set the current number of output tokens. Does nothing before `begin`."""
        new = output_tokens - self._counted
        if not self.begun or new <= 0:
            return
        interval_s = max(0.0, now_s - self._sampled_s) / new
        self._pacer.add(TokenRun(self._sampled_s + interval_s, interval_s, new))
        self._counted, self._sampled_s = output_tokens, now_s

    def slack_tokens(self, now_s: float) -> float:
        """Return the tokens ready beyond those that the user should have read by now; negative: behind."""
        return self._pacer.slack_tokens(now_s)

    # ---- on to another worker

    def leave(self, now_s: float) -> worker_pb2.AnswerPace | None:
        """Return the state for the next worker; None before the first answering token."""
        if not self.begun:
            return None
        state = self._pacer.state()
        return worker_pb2.AnswerPace(
            since_first_s=max(0.0, now_s - state.first_s),
            ready=state.ready,
            digested_s=state.digested_s,
            digested_sum_s=state.digested_sum_s,
        )

    def go_on(self, previous: worker_pb2.AnswerPace, output_tokens: int, now_s: float) -> None:
        """Continue from the previous worker's state, recorded at `output_tokens` output tokens."""
        self._pacer.resume(
            PacerState(
                previous.ready, now_s - previous.since_first_s, previous.digested_s, previous.digested_sum_s
            )
        )
        self._counted, self._sampled_s = output_tokens, now_s

    def recover(self, answer_tokens: int, answering_s: float, output_tokens: int, now_s: float) -> None:
        """Continue after an instance was lost: the front end reports `answer_tokens` generated in
        `answering_s` seconds."""
        if answer_tokens <= 0:
            return
        self.begin(output_tokens - answer_tokens, now_s - answering_s)
        self.count(output_tokens, now_s)


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """What is kept of a request besides the engine's state: its identity, and how its answer could be
    read."""

    request_id: str
    frontend_id: str
    epoch: int
    traceparent: str
    # When it arrived at its front end, on this machine's monotonic clock; None: not known.
    arrived_s: float | None
    pace: AnswerPace = field(compare=False)


class RunningRequests:
    """Track requests from submission or adoption until they end here. Touched a few times in a request's
    life."""

    def __init__(self, reading_s: Callable[[], float] = lambda: READING_S) -> None:
        """`reading_s`: the users' reading pace in seconds per token. An answer keeps the pace at its
        request's arrival."""
        self._reading_s = reading_s
        self._by_key: dict[RequestKey, RunningRequest] = {}
        self._by_id: dict[str, RunningRequest] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def add(
        self,
        key: RequestKey,
        request_id: str,
        frontend_id: str,
        epoch: int,
        traceparent: str = "",
        arrived_s: float | None = None,
    ) -> RunningRequest:
        """Add a request. `arrived_s`: as in RunningRequest."""
        pace = AnswerPace(self._reading_s())
        request = RunningRequest(request_id, frontend_id, epoch, traceparent, arrived_s, pace)
        self.remove(key)
        self._by_key[key] = self._by_id[request_id] = request
        return request

    def items(self) -> Iterator[tuple[RequestKey, RunningRequest]]:
        """Iterate over all requests."""
        return iter(list(self._by_key.items()))

    def get(self, key: RequestKey) -> RunningRequest | None:
        """Return the request with this key, or None."""
        return self._by_key.get(key)

    def by_id(self, request_id: str) -> RunningRequest | None:
        """Return the request with this id of vLLM's API server, or None."""
        return self._by_id.get(request_id)

    def remove(self, key: RequestKey) -> RunningRequest | None:
        """Remove and return a request, or return None."""
        request = self._by_key.pop(key, None)
        if request is None:
            return None
        if self._by_id.get(request.request_id) is request:
            del self._by_id[request.request_id]
        return request

    def remove_client(self, client: int) -> list[RunningRequest]:
        """Remove and return all requests of a front end whose stream ended."""
        keys = [key for key in self._by_key if key.client == client]
        return [request for key in keys if (request := self.remove(key)) is not None]
