"""The request of each row of a step's sampled states, and its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rows:
    """Row i belongs to request `request_ids[i]`, which has `generated[i]` output tokens before this step, or
    -1 if it is in the middle of its prompt."""

    request_ids: list[str]
    generated: list[int]


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of one model runner. `now` returns those of the step that is sampling, or None."""

    now: Callable[[], Rows | None]
    close: Callable[[], None]


def rows_of_v1(runner: Any) -> BatchRows:
    """Return the rows of Model Runner V1."""

    def now() -> Rows:
        batch = runner.input_batch
        in_prompt = runner.discard_request_mask.np[: batch.num_reqs]
        request_ids = list(batch.req_ids)
        generated = [
            -1 if unfinished else len(runner.requests[request_id].output_token_ids)
            for request_id, unfinished in zip(request_ids, in_prompt, strict=True)
        ]
        return Rows(request_ids, generated)

    return BatchRows(now, _nothing)


def rows_of_v2(runner: Any) -> BatchRows:
    """Return the rows of Model Runner V2; wraps its `sample` method, which gets the batch as an argument."""
    sample = runner.sample
    batches: list[Any] = []

    def watched(hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        batches.append(input_batch)
        try:
            return sample(hidden_states, input_batch, grammar_output)
        finally:
            batches.pop()

    def now() -> Rows | None:
        if not batches:
            return None
        batch = batches[-1]
        after = batch.num_computed_tokens_np + batch.num_scheduled_tokens
        prompts = runner.req_states.prompt_len.np[batch.idx_mapping_np]
        generated = [
            -1 if tokens < prefill else int(tokens - prompt)
            for tokens, prefill, prompt in zip(after, batch.prefill_len_np, prompts, strict=True)
        ]
        return Rows(list(batch.req_ids), generated)

    def close() -> None:
        runner.sample = sample

    runner.sample = watched
    return BatchRows(now, close)


def _nothing() -> None:
    return
