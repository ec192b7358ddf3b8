"""Conversion of a step's outputs from vLLM's to the worker's: a message and columns for each front end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.serial_utils import MsgpackEncoder

from tailrace.output_flags import OutputFlag
from worker_agent.engine.base import RequestKey, StepColumns
from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.step_times import RecentIntervals, RecentStepTimes
from worker_agent.engine.vllm.requests import VllmRequests

# Plain ints, because enum operators take a microsecond each, and these are used for every token.
_FINISHED: Final = int(OutputFlag.FINISHED)
_REASONING_ENDED: Final = int(OutputFlag.REASONING_ENDED)


class OutputWriter:
    """Encodes outputs with vLLM's own encoder and updates the requests' counts. Engine thread only."""

    def __init__(self, table: VllmRequests) -> None:
        self._table = table
        self._encoder = MsgpackEncoder()
        self.steps = 0
        self.generated_tokens = 0
        # Prompt tokens of requests that have generated their first token here, and those found in caches.
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        # Those of the latter that were loaded from host memory or by another connector.
        self.loaded_prompt_tokens = 0
        self.intervals = RecentIntervals()
        self.times = RecentStepTimes()

    def step(self, outputs: Mapping[int, EngineCoreOutputs] | None) -> list[StepColumns]:
        """Return the columns of one engine step, and remove requests that finished in it from the table."""
        self.steps += 1
        if not outputs:
            return []
        now_s = time.monotonic()
        return [self._client(client, message, now_s) for client, message in outputs.items()]

    def failed(
        self, key: RequestKey, request_id: str, epoch: int, first_index: int, refusal: EngineRefusal
    ) -> StepColumns:
        """Return the output of a request that cannot run here."""
        message = EngineCoreOutputs(
            outputs=[EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)]
        )
        flags = OutputFlag.FAILED | OutputFlag.FINISHED
        columns = self._single(key, epoch, first_index, flags, message)
        columns.refusal = refusal
        return columns

    def ended(self, key: RequestKey, epoch: int, first_index: int, output: EngineCoreOutput) -> StepColumns:
        """Return the finish, without a token, of a request that had generated its last token elsewhere."""
        message = EngineCoreOutputs(outputs=[output])
        return self._single(key, epoch, first_index, OutputFlag.FINISHED, message)

    def _single(
        self, key: RequestKey, epoch: int, first_index: int, flags: OutputFlag, message: EngineCoreOutputs
    ) -> StepColumns:
        return StepColumns(
            client=key.client,
            step=self.steps,
            frames=self._encode(message),
            handles=[key.handle],
            epochs=[epoch],
            first_indices=[first_index],
            counts=[0],
            flags=[int(flags)],
        )

    def _client(self, client: int, message: EngineCoreOutputs, now_s: float) -> StepColumns:
        columns = StepColumns(client, self.steps, self._encode(message))
        # Bound once: every lookup here is repeated for each request of each step.
        find = self._table.get
        add_handle, add_epoch = columns.handles.append, columns.epochs.append
        add_first_index, add_count = columns.first_indices.append, columns.counts.append
        add_tokens, add_flags = columns.token_ids.extend, columns.flags.append
        # All requests of the last step have the same interval: count it once for all of them.
        shared_ms, sharing = 0.0, 0
        for output in message.outputs:
            entry = find(output.request_id)
            if entry is None:
                # All requests of the scheduler are in the table; skipping one would misalign the columns.
                raise RuntimeError(f"output for unknown request {output.request_id}")
            tokens = output.new_token_ids
            count = len(tokens)
            flags = 0
            if count:
                flags = entry.phases.advance(tokens)
                if flags & _REASONING_ENDED:
                    entry.turn.start_answering(time.time())
                interval_ms = entry.pace.add(now_s, count)
                if interval_ms != shared_ms:
                    self._count(now_s, shared_ms, sharing)
                    shared_ms, sharing = interval_ms, 0
                    if entry.preemptions != entry.request.num_preemptions:
                        # It did not run meanwhile, which says nothing about how long steps take.
                        entry.preemptions = entry.request.num_preemptions
                        shared_ms = 0.0
                sharing += count
            if output.prefill_stats is not None:
                self._count_prompt(output.prefill_stats)
            if output.finish_reason is not None:
                flags |= _FINISHED
                self._table.remove(entry)
            first_index = entry.emitted
            entry.emitted = first_index + count
            add_handle(entry.key.handle)
            add_epoch(entry.epoch)
            add_first_index(first_index)
            add_count(count)
            add_tokens(tokens)
            add_flags(flags)
        self._count(now_s, shared_ms, sharing)
        self.generated_tokens += len(columns.token_ids)
        return columns

    def _count_prompt(self, stats: PrefillStats) -> None:
        """Count a prompt whose first token was generated in this step."""
        self.prompt_tokens += stats.num_prompt_tokens
        self.cached_prompt_tokens += stats.num_cached_tokens
        self.loaded_prompt_tokens += stats.num_external_cached_tokens

    def _count(self, now_s: float, interval_ms: float, tokens: int) -> None:
        """Count an interval for this many tokens; 0 means that they were their requests' first here."""
        if interval_ms and tokens:
            self.intervals.add(now_s, interval_ms, tokens)

    def _encode(self, message: EngineCoreOutputs) -> list[bytes]:
        return [bytes(frame) for frame in self._encoder.encode(message)]
