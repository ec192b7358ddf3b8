"""Length prediction on a running engine: the hidden-state tap and its predictor."""

from __future__ import annotations

from pathlib import Path

from tailrace.predictor.file import PredictorFileError, load_predictor
from worker_agent.engine.vllm.hidden_states import HiddenStateTap
from worker_agent.engine.vllm.load import LoadedCore
from worker_agent.engine.vllm.predictions import LengthPredictions, PredictionCost
from worker_agent.engine.vllm.requests import RequestTable


class LengthWatch:
    """Predicts the lengths of an engine's requests while it runs. Engine thread only."""

    def __init__(self, tap: HiddenStateTap, predictions: LengthPredictions) -> None:
        self._tap = tap
        self._predictions = predictions

    @classmethod
    def of(cls, file: str, core: LoadedCore, table: RequestTable) -> LengthWatch | None:
        """Start predicting with the predictor in `file`; return None if `file` is empty.

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

    @property
    def cost(self) -> PredictionCost:
        """The cost of predictions so far."""
        return self._predictions.cost

    def before_step(self) -> None:
        """Arm the tap if the next step is to be observed. Call before every step."""
        self._predictions.before_step(self._tap)

    def close(self) -> None:
        """Remove the tap and stop the predictor's thread."""
        self._tap.close()
        self._predictions.close()
