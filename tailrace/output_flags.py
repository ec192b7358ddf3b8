"""What a worker tells of the outputs that a request got in one step."""

from __future__ import annotations

import enum


class OutputFlag(enum.IntFlag):
    """Flags of one request's outputs in one step (StepOutputs.flags).

    A request that does not reason has PREFILL_DONE and REASONING_ENDED at once, because its first token
    belongs to the answer. One that reasons has ANSWER_BEGUN with the token after the one that ended its
    reasoning, wherever that is made: in the same step, after a preemption, or on another instance.
    """

    NONE = 0
    FINISHED = 1
    PREFILL_DONE = 2
    REASONING_ENDED = 4
    # The request failed in the engine (finish reason "error"); it may be retried elsewhere.
    FAILED = 8
    ANSWER_BEGUN = 16
