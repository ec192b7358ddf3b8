"""Training, evaluation and the predictor file, on easy samples."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch comes with the engine")

import torch
from safetensors.torch import load_file, save_file

from tailrace.predictor.evaluate import coverage, evaluate
from tailrace.predictor.file import Predictor, PredictorFileError, load_predictor, save_predictor
from tailrace.predictor.network import widths_for
from tailrace.predictor.samples import split_by_request
from tailrace.predictor.train import Epoch, Trained, TrainingOptions, least_error, train, train_on
from tailrace.tiny import PREDICTOR_PATH
from tests.predictor.synthetic import HIDDEN, Truth, cut_off, samples

OPTIONS = TrainingOptions(epochs=30, widths=(32, 32, 16), batch=32)


@pytest.fixture(scope="module")
def trained() -> Trained:
    return train(samples(120, 1), OPTIONS, lambda _: None)


def test_training_reduces_the_error(trained: Trained) -> None:
    assert trained.best.validation_mae < trained.epochs[0].validation_mae / 2
    assert trained.best.validation_loss == min(epoch.validation_loss for epoch in trained.epochs)


def test_the_best_epoch_is_kept(trained: Trained) -> None:
    validation = split_by_request(samples(120, 1), OPTIONS.seed).validation
    error = np.abs(trained.predictor.remaining(validation.hidden) - validation.remaining).mean()
    assert error == pytest.approx(trained.best.validation_mae, rel=1e-3)


def test_training_is_reproducible(trained: Trained) -> None:
    again = train(samples(120, 1), OPTIONS, lambda _: None)
    assert again.epochs == trained.epochs


def test_training_stops_when_validation_stops_improving() -> None:
    """Lengths are unrelated to the states, so memorizing the training set does not help."""
    draw = np.random.default_rng(0)
    split = split_by_request(samples(40, 1), 0)
    for part in (split.training, split.validation):
        part.remaining[:] = draw.integers(1, 400, len(part))
    reported: list[Epoch] = []
    found = train_on(
        split.training,
        split.validation,
        TrainingOptions(epochs=100, patience=3, widths=(64, 64, 64), batch=16, rate=3e-3),
        reported.append,
    )
    assert reported == found.epochs
    assert len(found.epochs) == found.best.number + 3 < 100


def test_evaluation_compares_with_less_informed_predictors(trained: Trained) -> None:
    evaluation = evaluate(trained.predictor, split_by_request(samples(120, 1), 0))
    assert evaluation.test_requests == 18
    assert sum(row.samples for row in evaluation.by_generated) == evaluation.total.samples
    assert evaluation.total.predictor < evaluation.total.prompt_only < evaluation.total.lengths_alone
    assert evaluation.total.cut_off == 0
    assert [row.level for row in evaluation.coverage] == [0.1, 0.25, 0.5, 0.75, 0.9]
    assert evaluation.cost.batch == 8
    assert evaluation.cost.share == evaluation.cost.call_s / (20 * 0.01)


def test_predictions_are_not_negative(trained: Trained) -> None:
    states = np.random.default_rng(0).normal(scale=50, size=(200, HIDDEN)).astype(np.float32)
    assert (trained.predictor.remaining(states) >= 0).all()


# ---- requests that were cut off


@pytest.fixture(scope="module")
def truth() -> Truth:
    return cut_off(2_500, seed=3, max_tokens=400)


@pytest.fixture(scope="module")
def censored(truth: Truth) -> Trained:
    return train(truth.samples, replace(OPTIONS, batch=128), lambda _: None)


def _bias(found: Trained, truth: Truth, level: float) -> float:
    """Return the mean ratio of predicted to true quantile, minus 1, where the truth is within the limit."""
    true = -np.log1p(-level) * truth.mean
    seen = true < 350
    return float((found.predictor.remaining(truth.samples.hidden[seen], level) / true[seen]).mean() - 1.0)


def test_cut_off_requests_do_not_bias_predictions(truth: Truth, censored: Trained) -> None:
    """A third of the requests are cut off. Without them, the median would be a third too short."""
    share = 1.0 - truth.samples.first().ended.mean()
    assert 0.25 < share < 0.5
    complete = truth.samples.select(truth.samples.ended)
    dropped = train(complete, replace(OPTIONS, batch=128), lambda _: None)
    assert _bias(dropped, truth, 0.5) < -0.25
    assert abs(_bias(censored, truth, 0.5)) < 0.08
    assert abs(_bias(censored, truth, 0.9)) < 0.1


def test_coverage_measures_the_calibration_of_quantiles(truth: Truth, censored: Trained) -> None:
    test = split_by_request(truth.samples, OPTIONS.seed).test
    for row in coverage(censored.predictor, test):
        assert row.share == pytest.approx(row.level, abs=0.08)
    # Predictions of half the true length are detected.
    halved = Predictor(censored.predictor.description, copy.deepcopy(censored.predictor.network))
    halved.network.edges /= 2.0
    (median,) = (row.share for row in coverage(halved, test) if row.level == 0.5)
    assert median < 0.42


def test_errors_of_cut_off_requests_are_lower_bounds() -> None:
    """At 100 generated tokens, a prediction of 150 is wrong by 50 if the request ended, else maybe right."""
    predicted = torch.tensor([150.0, 150.0, 70.0, 70.0])
    known, ended = torch.full((4,), 100.0), torch.tensor([True, False, True, False])
    assert least_error(predicted, known, ended).tolist() == [50.0, 0.0, 30.0, 30.0]


def test_training_requires_a_finished_request(truth: Truth) -> None:
    longer = truth.samples.select(~truth.samples.ended)
    with pytest.raises(ValueError, match="raise --max-tokens"):
        train(longer, OPTIONS, lambda _: None)


def test_layer_widths_of_the_paper() -> None:
    assert widths_for(3584) == (2048, 512, 64)
    assert widths_for(8192) == (2048, 512, 64)


def test_a_predictor_is_saved_and_loaded(trained: Trained, tmp_path: Path) -> None:
    save_predictor(trained.predictor, tmp_path / "p")
    read = load_predictor(tmp_path / "p")
    states = samples(10, 2).hidden
    assert read.description == trained.predictor.description
    np.testing.assert_array_equal(read.remaining(states), trained.predictor.remaining(states))


@pytest.fixture
def file(trained: Trained, tmp_path: Path) -> tuple[Predictor, Path]:
    save_predictor(trained.predictor, tmp_path / "p")
    return trained.predictor, tmp_path / "p"


def _rewrite(predictor: Predictor, path: Path, changes: Mapping[str, object]) -> None:
    tensors = load_file(path) | {k: v for k, v in changes.items() if isinstance(v, torch.Tensor)}
    description = msgspec.to_builtins(predictor.description) | {
        k: v for k, v in changes.items() if k not in tensors
    }
    save_file(tensors, path, metadata={"description": msgspec.json.encode(description).decode()})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"mean": torch.zeros(3)}, r"mean: shape \(8,\) expected"),
        ({"layers.2.weight": torch.full((16, 32), float("nan"))}, r"layers\.2\.weight: contains"),
        ({"layers.4.weight": torch.zeros(1)}, r"layers\.4\.weight: unknown"),
        ({"edges": torch.ones(33)}, "edges: must increase"),
        ({"format": "other"}, r"description\.format: 'other'"),
        ({"format": "tailrace-length-predictor-1"}, "train it again"),
        ({"hidden_size": "wide"}, r"description: .*hidden_size"),
        ({"hidden_size": 0}, "description: hidden_size"),
        ({"extra": 1}, "description: .*extra"),
    ],
)
def test_errors_in_a_predictor_file_name_the_field(
    changes: dict[str, object], field: str, file: tuple[Predictor, Path]
) -> None:
    _rewrite(*file, changes)
    with pytest.raises(PredictorFileError, match=field):
        load_predictor(file[1])


def test_other_files_are_errors(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"no tensors")
    with pytest.raises(PredictorFileError, match="cannot be read"):
        load_predictor(tmp_path / "p")


def test_the_predictor_of_the_tiny_model_is_small() -> None:
    predictor = load_predictor(PREDICTOR_PATH)
    assert predictor.description.hidden_size == 96
    assert predictor.description.model == "tailrace-tiny"
    assert PREDICTOR_PATH.stat().st_size < 1_000_000
