"""Track how a user can read an answer: pacer slack and QoE (tailrace/qoe.py).

The worker knows when each token was generated, and policies see its reports. The front end knows more only
when an instance is lost, and then includes it in its Submit. There is no work per token: the first answering
token is timed exactly, the others are counted when a report is due and treated as evenly spaced since the
previous count. Slack is exact; QoE does not see stalls shorter than a report's interval.
"""

from __future__ import annotations

from tailrace.qoe import PacerState, TokenPacer, TokenRun
from tailrace.v1 import worker_pb2


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
