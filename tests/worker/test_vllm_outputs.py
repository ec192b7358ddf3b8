"""One step's columns: aligned with vLLM's message, and counted once per request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tailrace.output_flags import OutputFlag
from worker_agent.engine.base import RequestKey

if TYPE_CHECKING:
    from worker_agent.engine.vllm.outputs import OutputWriter
    from worker_agent.engine.vllm.requests import VllmRequest, VllmRequests

pytestmark = pytest.mark.vllm

END_OF_REASONING = 9
PREFILL, ENDED, BEGUN = OutputFlag.PREFILL_DONE, OutputFlag.REASONING_ENDED, OutputFlag.ANSWER_BEGUN


class Reasoner:
    """A parser of which no prompt ends the reasoning."""

    def is_reasoning_end(self, token_ids: list[int]) -> bool:
        return False


def tables() -> tuple[VllmRequests, OutputWriter]:
    from worker_agent.engine.vllm.outputs import OutputWriter
    from worker_agent.engine.vllm.requests import VllmRequests

    table = VllmRequests()
    return table, OutputWriter(table)


def add(
    table: VllmRequests, handle: int, epoch: int = 0, emitted: int = 0, reasons: bool = False
) -> VllmRequest:
    """Add request "r<handle>"."""
    from worker_agent.engine.turns import Turn
    from worker_agent.engine.vllm.phases import PhaseTracker, ReasoningMarks
    from worker_agent.engine.vllm.requests import Pace, VllmRequest

    parser: Any = Reasoner()
    marks = ReasoningMarks(parser, frozenset([END_OF_REASONING])) if reasons else None
    request: Any = SimpleNamespace(num_preemptions=0)
    entry = VllmRequest(
        key=RequestKey(0, handle),
        request_id=f"r{handle}",
        epoch=epoch,
        frames=[],
        frontend_id="f",
        traceparent="",
        request=request,
        phases=PhaseTracker(marks, [1]),
        pace=Pace(),
        emitted=emitted,
        turn=Turn(handle),
    )
    table.add(entry)
    return entry


def message(*outputs: Any) -> dict[int, Any]:
    from vllm.v1.engine import EngineCoreOutputs

    return {0: EngineCoreOutputs(outputs=list(outputs))}


def test_columns_follow_the_outputs_of_the_message() -> None:
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    table, writer = tables()
    for handle, epoch, emitted in ((5, 2, 40), (6, 0, 0), (7, 1, 3)):
        add(table, handle, epoch, emitted)
    # The order of the message is not that of the table; one request has two tokens, and one only ends.
    (columns,) = writer.step(
        message(
            EngineCoreOutput("r7", [11, 12]),
            EngineCoreOutput("r5", [], finish_reason=FinishReason.ABORT),
            EngineCoreOutput("r6", [13], finish_reason=FinishReason.LENGTH),
        )
    )
    begun = OutputFlag.PREFILL_DONE | OutputFlag.REASONING_ENDED
    assert columns.handles == [7, 5, 6]
    assert columns.epochs == [1, 2, 0]
    assert columns.first_indices == [3, 40, 0]
    assert columns.counts == [2, 0, 1]
    assert columns.token_ids == [11, 12, 13]
    assert columns.flags == [begun, OutputFlag.FINISHED, begun | OutputFlag.FINISHED]
    # The message's encoder takes plain ints only.
    assert {type(flags) for flags in columns.flags} == {int}
    (frame,) = columns.frames
    assert [output[0] for output in msgspec.msgpack.decode(frame)[1]] == ["r7", "r5", "r6"]
    assert [entry.request_id for entry in table] == ["r7"]
    assert writer.generated_tokens == 3
    (columns,) = writer.step(message(EngineCoreOutput("r7", [14])))
    assert (columns.first_indices, columns.flags, columns.step) == ([5], [0], 2)


def test_flags_mark_the_end_of_the_reasoning_and_the_token_after_it() -> None:
    from vllm.v1.engine import EngineCoreOutput

    table, writer = tables()
    entry = add(table, 1, reasons=True)
    flags = []
    for token in (3, 4, END_OF_REASONING, 5, 6):
        (columns,) = writer.step(message(EngineCoreOutput("r1", [token])))
        flags += columns.flags
    assert flags == [OutputFlag.PREFILL_DONE, 0, OutputFlag.REASONING_ENDED, OutputFlag.ANSWER_BEGUN, 0]
    assert entry.phases.reasoning_tokens == 3
    assert entry.turn.answering_s > 0


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # Several tokens in a step, of which the answer's first is one.
        ([[3], [4, END_OF_REASONING, 5], [6]], [PREFILL, ENDED | BEGUN, 0]),
        ([[END_OF_REASONING, 5], [6]], [PREFILL | ENDED | BEGUN, 0]),
        # A preemption between the end of the reasoning and the answer.
        ([[3], [END_OF_REASONING], None, [5], [6]], [PREFILL, ENDED, PREFILL | ENDED | BEGUN, 0]),
        # One before, and one after.
        ([[3], None, [4], [END_OF_REASONING], [5]], [PREFILL, PREFILL, ENDED, BEGUN]),
        ([[3], [END_OF_REASONING], [5], None, [6]], [PREFILL, ENDED, BEGUN, PREFILL | ENDED]),
    ],
)
def test_answer_begins_once_wherever_its_first_token_is_made(
    steps: list[list[int] | None], expected: list[int]
) -> None:
    from worker_agent.engine.vllm.phases import PhaseTracker, ReasoningMarks

    parser: Any = Reasoner()
    phases = PhaseTracker(ReasoningMarks(parser, frozenset([END_OF_REASONING])), [1])
    flags = []
    for tokens in steps:
        if tokens is None:
            phases.back_to_prefill()
        else:
            flags.append(phases.advance(tokens))
    assert flags == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([3, END_OF_REASONING], PREFILL | ENDED | BEGUN),
        ([3, END_OF_REASONING, 5], PREFILL | ENDED),
        ([3, 4], PREFILL),
    ],
)
def test_answer_begins_on_the_instance_that_continues(tokens: list[int], expected: int) -> None:
    from worker_agent.engine.vllm.phases import PhaseTracker, ReasoningMarks

    parser: Any = Reasoner()
    phases = PhaseTracker(ReasoningMarks(parser, frozenset([END_OF_REASONING])), [1])
    phases.replay(tokens)
    phases.back_to_prefill()
    assert phases.advance([6]) == expected


def test_prompts_are_counted_with_their_first_token() -> None:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.metrics.stats import PrefillStats

    table, writer = tables()
    add(table, 1)
    stats = PrefillStats()
    stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_external_cached_tokens = 9, 4, 3
    writer.step(message(EngineCoreOutput("r1", [3], prefill_stats=stats)))
    writer.step(message(EngineCoreOutput("r1", [4])))
    assert (writer.prompt_tokens, writer.cached_prompt_tokens, writer.loaded_prompt_tokens) == (9, 4, 3)


def test_each_token_of_a_step_counts_with_its_share_of_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import EngineCoreOutput

    table, writer = tables()
    entries = [add(table, handle) for handle in (1, 2)]
    for now_s, tokens in ((100.0, 1), (100.06, 3)):
        monkeypatch.setattr("worker_agent.engine.vllm.outputs.time.monotonic", lambda now_s=now_s: now_s)
        writer.step(message(EngineCoreOutput("r1", [3] * tokens), EngineCoreOutput("r2", [3])))
    # Three tokens 20 ms apart and one after 60 ms.
    assert writer.intervals.mean_and_p99_ms(100.1)[0] == pytest.approx(30.0)
    assert [entry.pace.interval_ms for entry in entries] == pytest.approx([20.0, 60.0])


def test_time_for_which_a_request_was_preempted_is_no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import EngineCoreOutput

    table, writer = tables()
    entries = [add(table, handle) for handle in (1, 2, 3)]
    for now_s, handles in ((100.0, (1, 2)), (109.98, (3,)), (110.0, (1, 2, 3)), (110.02, (1, 2, 3))):
        monkeypatch.setattr("worker_agent.engine.vllm.outputs.time.monotonic", lambda now_s=now_s: now_s)
        writer.step(message(*(EngineCoreOutput(f"r{handle}", [3]) for handle in handles)))
        if handles == (3,):
            for entry in entries[:2]:
                entry.request.num_preemptions = 1
    assert writer.intervals.mean_and_p99_ms(110.1)[0] == pytest.approx(20.0)


def test_output_of_a_request_that_is_not_in_the_table_is_an_error() -> None:
    from vllm.v1.engine import EngineCoreOutput

    _, writer = tables()
    with pytest.raises(RuntimeError, match="unknown request r1"):
        writer.step(message(EngineCoreOutput("r1", [3])))
