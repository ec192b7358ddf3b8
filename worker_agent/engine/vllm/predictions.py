"""Predicted lengths of the running requests (ARES, sections 4.3 and 5.3), every k = 20 steps, in one batch.

A request's first prediction uses the state of its last prompt token, in whichever step that is computed: the
dispatch from prefill to decode (section 3) depends on it.

The engine thread arms the tap and gets a tensor. On a GPU it hands the tensor to a thread of its own, which
waits until the step has computed it; a batch that arrives while the previous one is still being processed is
dropped: predictions become less frequent, and no step ever waits. On a CPU the engine thread runs the network
itself, inside the step: another thread would compete for the same core and, operation by operation, for the
GIL, which takes several times as long as the network.
"""

from __future__ import annotations

import logging
import queue
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from tailrace.predictor.file import Predictor, PredictorFileError, load_predictor
from worker_agent.engine.vllm.hidden_states import HiddenStateTap, StepStates
from worker_agent.engine.vllm.load import LoadedCore
from worker_agent.engine.vllm.requests import LengthPrediction, VllmRequests

_log = logging.getLogger(__name__)

INTERVAL_STEPS: Final = 20
"""Steps between predictions (section 5.3)."""

_STOP_DEADLINE_S = 10.0


class LengthPredictions:
    """Created and fed by the engine thread."""

    def __init__(self, predictor: Predictor, table: VllmRequests) -> None:
        """`predictor` must be on the model's device."""
        self._predictor = predictor
        self._table = table
        self._steps = 0
        self._failed = False
        self._batches: queue.Queue[StepStates | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._run, name="length-predictor", daemon=True)
        self._thread.start()

    def before_step(self, tap: HiddenStateTap) -> None:
        """Count a step, and arm the tap for every k-th and for any that may end a prompt."""
        if self._steps % INTERVAL_STEPS == 0:
            tap.arm()
        elif self._table.has_prompts:
            tap.arm_for_prompts()
        self._steps += 1

    def take(self, states: StepStates) -> None:
        """Predict from the states of an observed step; those of a GPU later, or not at all if the thread is
        busy."""
        if states.ready is None:
            if not self._failed:
                self._predict(states)
            return
        with suppress(queue.Full):
            self._batches.put_nowait(states)

    def close(self) -> None:
        """Stop the thread after its current batch."""
        try:
            self._batches.put(None, timeout=_STOP_DEADLINE_S)
        except queue.Full:
            _log.warning("the length predictor did not stop within %.0f s", _STOP_DEADLINE_S)
            return
        self._thread.join(_STOP_DEADLINE_S)

    def _run(self) -> None:
        """Predict on the thread, until closed or failed."""
        while not self._failed and (states := self._batches.get()) is not None:
            self._predict(states)

    def _predict(self, states: StepStates) -> None:
        try:
            if states.ready is not None:
                states.ready.synchronize()
            remaining: list[float] = self._predictor.remaining_on_device(states.hidden).tolist()
        except RuntimeError:
            # Requests continue without predictions, which policies handle like an engine without a predictor.
            _log.exception("length prediction has stopped")
            self._failed = True
            for entry in self._table:
                entry.prediction = None
            return
        for request_id, generated, tokens in zip(
            states.request_ids, states.generated, remaining, strict=True
        ):
            found = self._table.get(request_id)
            if found is not None and generated >= 0:
                found.prediction = LengthPrediction(generated, tokens)


class LengthWatch:
    """Predicts the lengths of an engine's requests while it runs. Engine thread only."""

    def __init__(self, tap: HiddenStateTap, predictions: LengthPredictions) -> None:
        self._tap = tap
        self._predictions = predictions

    @classmethod
    def of(cls, file: str | None, core: LoadedCore, table: VllmRequests) -> LengthWatch | None:
        """Start predicting with the predictor in `file`; return None without one.

        Raises RuntimeError if the file is not a predictor or is for another model.
        """
        if not file:
            return None
        device = str(core.config.device_config.device)
        try:
            predictor = load_predictor(Path(file), device)
        except PredictorFileError as error:
            raise RuntimeError(f"length predictor {error}") from error
        wanted = core.config.model_config.get_hidden_size()
        if predictor.description.hidden_size != wanted:
            found = predictor.description
            raise RuntimeError(
                f"length predictor {file} has hidden size {found.hidden_size} ({found.model}), but "
                f"this model has {wanted}"
            )
        predictions = LengthPredictions(predictor, table)
        return cls(core.tap(predictions.take), predictions)

    def before_step(self) -> None:
        """Arm the tap if the next step is to be observed. Call before every step."""
        self._predictions.before_step(self._tap)

    def close(self) -> None:
        """Remove the tap and stop the predictor's thread."""
        self._tap.close()
        self._predictions.close()
