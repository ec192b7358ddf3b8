"""`tailrace claims`: runs, verdicts, selection and output, with synthetic experiments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from simulator.claims.base import Claim, Experiment, Figures, Finding, Run, Verdict
from simulator.claims.catalogue import UnknownClaimError, check, experiments, select
from simulator.cli import claims as command
from tests.simulator.command_lines import run_cli, run_cli_ok

pytestmark = pytest.mark.fleet


def _measure(value: float) -> Figures:
    if value < 0.0:
        raise ValueError("nothing to measure")
    return {"value": value, "squares": [value * value]}


def _judge_first(figures: Mapping[str, Figures]) -> Sequence[Finding]:
    gain = float(str(figures["with"]["value"])) / float(str(figures["without"]["value"]))
    return [
        Finding(
            "T1",
            f"{gain:g}x",
            Verdict.HOLDS,
            "as it should",
            {"gain": gain, "series": [1.0, 2.0]},
            {"gain": 0.5},
        ),
        Finding("T2", "-", Verdict.NOT_REPRODUCIBLE, "needs a GPU"),
    ]


def _judge_second(figures: Mapping[str, Figures]) -> Sequence[Finding]:
    return [Finding("U1", "0", Verdict.DOES_NOT_HOLD, "it does not")]


FIRST = Experiment(
    "first",
    (
        Claim("T1", "Test", "figure 1", "faster", "2x"),
        Claim("T2", "Test", "table 2", "hotter", "80 C"),
    ),
    (Run("with", _measure, (6.0,)), Run("without", _measure, (3.0,))),
    _judge_first,
)
SECOND = Experiment(
    "second",
    (Claim("U1", "Other", "section 3", "more", "1"),),
    (Run("with", _measure, (1.0,)),),
    _judge_second,
)
FAILING = Experiment(
    "failing", (Claim("V1", "Bad", "nowhere", "none", "0"),), (Run("it", _measure, (-1.0,)),), _judge_second
)


@pytest.fixture
def synthetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the experiments of the command by synthetic ones."""
    monkeypatch.setattr(command, "experiments", lambda _traces, _effort: [FIRST, SECOND])


def test_two_experiments_can_have_runs_of_the_same_name() -> None:
    found = {one.claim.claim_id: one.finding for one in check([FIRST, SECOND], processes=1)}
    assert found["T1"].ours == "2x"
    assert found["U1"].verdict is Verdict.DOES_NOT_HOLD


def test_an_experiment_must_judge_its_own_claims() -> None:
    other = Experiment("other", FIRST.claims, SECOND.runs, _judge_second)
    with pytest.raises(ValueError, match="other judges"):
        check([other], processes=1)


@pytest.mark.parametrize(
    ("wanted", "experiments_", "ids"),
    [
        ((), ["first", "second"], {"T1", "T2", "U1"}),
        (("t2",), ["first"], {"T2"}),
        (("test",), ["first"], {"T1", "T2"}),
        (("U1", "TEST"), ["first", "second"], {"T1", "T2", "U1"}),
    ],
)
def test_claims_are_selected_by_id_or_paper(
    wanted: tuple[str, ...], experiments_: list[str], ids: set[str]
) -> None:
    needed, chosen = select([FIRST, SECOND], wanted)
    assert [experiment.name for experiment in needed] == experiments_
    assert chosen == ids


def test_an_unknown_claim_is_an_error() -> None:
    with pytest.raises(UnknownClaimError, match="unknown claim or paper 'x'; papers: Test, Other"):
        select([FIRST, SECOND], ["x"])


@pytest.mark.usefixtures("synthetic")
def test_json_output_and_saved_file(tmp_path: Path) -> None:
    path = tmp_path / "claims.json"
    reply = json.loads(run_cli_ok("claims", "-o", "json", "--save", path, "--processes", 1).stdout)
    assert [claim["id"] for claim in reply["claims"]] == ["T1", "T2", "U1"]
    assert reply["claims"][0] | {} == {
        "id": "T1",
        "paper": "Test",
        "where": "figure 1",
        "claim": "faster",
        "number": "2x",
        "ours": "2x",
        "verdict": "holds",
        "why": "as it should",
        "figures": {"gain": 2.0, "series": [1.0, 2.0]},
        "spreads": {"gain": 0.5},
    }
    assert reply["verdicts"] == {"holds": 1, "does not hold": 1, "not reproducible here": 1}
    assert json.loads(path.read_text()) == reply


@pytest.mark.usefixtures("synthetic")
def test_table_of_selected_claims() -> None:
    lines = run_cli_ok("claims", "T2", "--processes", 1).stdout.splitlines()
    assert len(lines) == 3
    assert lines[1].split() == [
        "T2",
        "hotter",
        "80",
        "C",
        "-",
        "not",
        "reproducible",
        "here",
        "needs",
        "a",
        "GPU",
    ]
    assert lines[2] == "1 not reproducible here"


@pytest.mark.usefixtures("synthetic")
def test_listing_runs_no_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "check", None)
    assert [line.split()[0] for line in run_cli_ok("claims", "--list").stdout.splitlines()] == [
        "ID",
        "T1",
        "T2",
        "U1",
    ]
    reply = json.loads(run_cli_ok("claims", "other", "--list", "-o", "json").stdout)
    assert reply["claims"] == [
        {"id": "U1", "paper": "Other", "where": "section 3", "claim": "more", "number": "1"}
    ]


@pytest.mark.usefixtures("synthetic")
def test_usage_errors(tmp_path: Path) -> None:
    result = run_cli("claims", "Z9")
    assert result.exit_code == 2
    assert (
        result.stderr
        == "tailrace: unknown claim or paper 'Z9'; papers: Test, Other; --list shows the claims\n"
    )
    result = run_cli("claims", "--save", tmp_path / "no" / "x.json")
    assert result.exit_code == 2
    assert "--save: there is no folder" in result.stderr


def test_a_failed_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "experiments", lambda _traces, _effort: [FAILING])
    result = run_cli("claims", "--processes", 1)
    assert result.exit_code == 1
    assert result.stderr == "tailrace: failing: it: ValueError: nothing to measure\n"


def test_claim_ids_and_experiment_names_are_distinct() -> None:
    everything = experiments()
    ids = [claim.claim_id for experiment in everything for claim in experiment.claims]
    assert len(set(ids)) == len(ids)
    assert len({experiment.name for experiment in everything}) == len(everything)


@pytest.mark.usefixtures("synthetic")
def test_html_report(tmp_path: Path) -> None:
    path = tmp_path / "claims.html"
    run_cli_ok("claims", "test", "--processes", 1, "--report", path)
    html = path.read_text()
    assert '<td class="yes">✓ holds</td>' in html
    assert '<td class="unknown">– not reproducible here</td>' in html
    assert "as it should" in html
    assert "U1" not in html
