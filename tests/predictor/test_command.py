"""`tailrace predictor`: what it prints, and what it refuses before minutes of work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tailrace.predictor.samples import write_samples
from tests.predictor.synthetic import samples
from worker_agent.predictor.command import predictor_command


def test_train_and_evaluate_as_json(tmp_path: Path) -> None:
    write_samples(samples(40, seed=1), tmp_path / "samples")
    trained = CliRunner().invoke(
        predictor_command,
        ["train", str(tmp_path / "samples"), "--out", str(tmp_path / "p"), "--epochs", "2", "-o", "json"],
    )
    assert trained.exit_code == 0, trained.output
    document = json.loads(trained.stdout)
    assert document["best"]["number"] in (1, 2)
    assert document["best"]["validation_mae"] > 0
    evaluated = CliRunner().invoke(
        predictor_command,
        ["evaluate", str(tmp_path / "samples"), "--predictor", str(tmp_path / "p"), "-o", "json"],
    )
    assert evaluated.exit_code == 0, evaluated.output
    assert json.loads(evaluated.stdout)["test_requests"] > 0


@pytest.mark.parametrize("command", [["collect"], ["train", "samples"]])
def test_a_file_that_could_not_be_written(command: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(predictor_command, [*command, "--out", str(tmp_path / "none" / "file")])
    assert result.exit_code == 2
    assert "there is no folder" in result.stderr
