"""`--model` chooses the cluster of a model in the local cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tailrace.cli.main import main
from tailrace.local.state import RUN_DIR_ENV, RunFolder, RunState
from tests.cli.scripted_admin import Script, serving, small_fleet


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Script]]:
    """Yield the fleet's and a model's admin API, as the state of a cluster names them."""
    scripts = {"fleet": small_fleet(), "coder": small_fleet()}
    monkeypatch.setenv(RUN_DIR_ENV, str(tmp_path))
    with serving(scripts["fleet"]) as fleet, serving(scripts["coder"]) as coder:
        models = {"chat": fleet, "coder": coder}
        RunFolder(tmp_path).write(RunState(admin=fleet, models=models, http="http://127.0.0.1:1"))
        yield scripts


@pytest.mark.parametrize(
    ("option", "asked"), [([], "fleet"), (["--model", "chat"], "fleet"), (["--model", "coder"], "coder")]
)
@pytest.mark.parametrize(
    "command", [["set", "slo", "ttft=1s"], ["get", "policies"], ["rollout", "forget", "code"]]
)
def test_the_cluster_of_a_model_is_asked(
    scripts: dict[str, Script], option: list[str], asked: str, command: list[str]
) -> None:
    result = CliRunner().invoke(main, [*command, *option])
    assert result.exit_code == 0, result.output
    assert {name for name, script in scripts.items() if script.received} == {asked}


def test_an_unknown_model_is_refused_with_the_known_ones(scripts: dict[str, Script]) -> None:
    result = CliRunner().invoke(main, ["get", "policies", "--model", "codre"])
    assert result.exit_code == 2
    assert "--model: 'codre' is none of chat, coder (did you mean 'coder'?)" in result.output


def test_an_address_leaves_nothing_to_choose(scripts: dict[str, Script]) -> None:
    result = CliRunner().invoke(main, ["get", "policies", "--model", "coder", "--admin", "127.0.0.1:1"])
    assert result.exit_code == 2 and "--model: chooses in the cluster of `tailrace up`" in result.output


def test_doctor_looks_at_each_cluster(scripts: dict[str, Script]) -> None:
    result = CliRunner().invoke(main, ["doctor"])
    assert "ok       policy: least_loaded" in result.output
    assert "ok       coder: policy: least_loaded" in result.output
