"""`tailrace predictor`: output, and errors that are reported before minutes of work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tailrace.predictor.samples import read_samples, write_samples
from tests.predictor.synthetic import samples
from tests.waiting import WAIT_S
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


@pytest.mark.vllm
@pytest.mark.slow
def test_cut_off_requests_are_collected(tmp_path: Path) -> None:
    """About half of the tiny model's tasks are longer than 300 tokens."""
    out = tmp_path / "samples"
    command = [sys.executable, "-m", "tailrace", "predictor", "collect", "-n", "12", "--max-tokens", "300"]
    command += ["--kv-cache-memory-bytes", "268435456", "--enforce-eager"]
    process = subprocess.run(
        [*command, "--out", str(out), "-o", "json"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    document = json.loads(process.stdout.splitlines()[-1])
    assert document["requests"] == 12
    assert 0 < document["cut_off"] < 12
    samples_of = read_samples(out)
    cut_off = samples_of.select(~samples_of.ended)
    assert (cut_off.generated + cut_off.remaining == 300).all()
    assert len(cut_off.first()) == document["cut_off"]


@pytest.mark.parametrize("command", [["collect"], ["train", "samples"]])
def test_an_unwritable_output_is_an_error(command: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(predictor_command, [*command, "--out", str(tmp_path / "none" / "file")])
    assert result.exit_code == 2
    assert "there is no folder" in result.stderr
