"""A step's outputs, from vLLM's to the worker's: one message and one set of columns a front end."""

from __future__ import annotations

import time
from collections.abc import Mapping

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.serial_utils import MsgpackEncoder

from worker_agent.engine.base import OutputFlag, RequestKey, StepColumns
from worker_agent.engine.intervals import RecentIntervals
from worker_agent.engine.vllm.requests import RequestTable


class OutputWriter:
    """Encodes outputs with vLLM's own encoder, and keeps the requests' counts. Engine thread only."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._encoder = MsgpackEncoder()
        self.steps = 0
        self.generated_tokens = 0
        self.intervals = RecentIntervals()

    def step(self, outputs: Mapping[int, EngineCoreOutputs] | None) -> list[StepColumns]:
        """Columns of one engine step; requests that finished in it leave the table."""
        self.steps += 1
        if not outputs:
            return []
        now_s = time.monotonic()
        return [self._client(client, message, now_s) for client, message in outputs.items()]

    def failed(self, key: RequestKey, request_id: str, epoch: int, first_index: int) -> StepColumns:
        """One request that cannot run here."""
        message = EngineCoreOutputs(
            outputs=[EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)]
        )
        flags = OutputFlag.FAILED | OutputFlag.FINISHED
        return self._single(key, epoch, first_index, flags, message)

    def ended(self, key: RequestKey, epoch: int, first_index: int, output: EngineCoreOutput) -> StepColumns:
        """One request that had already met its end where it came from: the finish without a token."""
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
        for output in message.outputs:
            entry = self._table.get(output.request_id)
            if entry is None:
                # Every request of the scheduler is in the table; a column less would shift all others.
                raise RuntimeError(f"output for unknown request {output.request_id}")
            tokens = output.new_token_ids
            flags = OutputFlag.NONE
            if tokens:
                flags = entry.phases.advance(tokens)
                self.generated_tokens += len(tokens)
                interval_ms = entry.pace.token(now_s)
                if interval_ms:
                    self.intervals.add(now_s, interval_ms)
            if output.finish_reason is not None:
                flags |= OutputFlag.FINISHED
                self._table.remove(entry)
            columns.handles.append(entry.key.handle)
            columns.epochs.append(entry.epoch)
            columns.first_indices.append(entry.emitted)
            columns.counts.append(len(tokens))
            columns.token_ids.extend(tokens)
            columns.flags.append(int(flags))
            entry.emitted += len(tokens)
        return columns

    def _encode(self, message: EngineCoreOutputs) -> list[bytes]:
        return [bytes(frame) for frame in self._encoder.encode(message)]
