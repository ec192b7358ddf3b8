"""`tailrace claims`: runs, verdicts, selection and output, with synthetic experiments."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from experiments.claims import command
from experiments.claims.base import Claim, Experiment, Figures, Finding, Run, Verdict
from experiments.claims.catalogue import UnknownClaimError, check, experiments, runs_of, select
from experiments.claims.kept import KeptFigures, code_version
from experiments.claims.verdicts import judged, number
from simulator.parallel import TaskProgress
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


def _judge_by_rows(figures: Mapping[str, Figures]) -> Sequence[Finding]:
    def judge(claim: Claim, run: str) -> Finding:
        number(figures[run], "value")
        return Finding(claim.claim_id, "1", Verdict.HOLDS, "it does")

    first, second, third = PARTLY_FAILING.claims
    return [
        *judged((first,), judge, first, "good"),
        *judged((second,), judge, second, "bad"),
        *judged((third,), judge, third, "unknown"),
    ]


PARTLY_FAILING = Experiment(
    "rows",
    tuple(Claim(f"V{n}", "Bad", "nowhere", "none", "0") for n in (1, 2, 3)),
    (Run("good", _measure, (4.0,)), Run("bad", _measure, (-1.0,))),
    _judge_by_rows,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep figures in the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tailrace" / "claims.jsonl"


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
    found = check([other, SECOND], processes=1)
    assert [one.finding.verdict for one in found[:2]] == [Verdict.NOT_JUDGED] * 2
    assert "other judges ['U1'], which are not its claims" in found[0].finding.why
    assert found[2].finding.verdict is Verdict.DOES_NOT_HOLD


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
        "inputs": "",
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


def test_rows_with_results_of_their_paper_in_the_set_up_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claims = [Claim("X1", "Test", "-", "a", "1", "figure 2"), Claim("X2", "Test", "-", "b", "1")]
    found = [
        Finding(c.claim_id, "2", v, "-")
        for c, v in zip(claims, (Verdict.EXCEEDS, Verdict.HOLDS), strict=True)
    ]
    monkeypatch.setattr(
        command, "experiments", lambda *_: [Experiment("x", tuple(claims), (), lambda _: found)]
    )
    lines = run_cli_ok("claims", "--processes", 1).stdout.splitlines()
    assert "exceeds" in lines[1] and lines[1].endswith("from the paper: figure 2; -")
    assert lines[2].endswith("holds    -")
    assert lines[3] == "1 holds, 1 exceeds"
    assert lines[4] == "of the 2 that hold or exceed, 1 has no result of its paper in the set-up"


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
        {"id": "U1", "paper": "Other", "where": "section 3", "claim": "more", "number": "1", "inputs": ""}
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


def test_a_row_that_cannot_be_judged_costs_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "experiments", lambda _traces, _effort: [PARTLY_FAILING, SECOND])
    report = tmp_path / "claims.html"
    result = run_cli("claims", "-o", "json", "--processes", 1, "--report", report)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "tailrace: could not be judged: V2, V3"
    found = {row["id"]: row for row in json.loads(result.stdout)["claims"]}
    assert {name: row["verdict"] for name, row in found.items()} == {
        "V1": "holds",
        "V2": "could not be judged",
        "V3": "could not be judged",
        "U1": "does not hold",
    }
    assert found["V2"]["why"] == "rows: bad: ValueError: nothing to measure"
    assert found["V3"]["why"].startswith("KeyError: 'unknown' (")
    assert "? could not be judged" in report.read_text()


def messages(result: Result) -> str:
    """Return what the command says besides its progress."""
    lines = result.stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("checking "))


@pytest.mark.usefixtures("synthetic")
def test_figures_are_kept_for_the_next_call(cache: Path) -> None:
    first = run_cli_ok("claims", "T1", "-o", "json", "--processes", 1)
    assert messages(first) == ""
    lines = cache.read_text().splitlines()
    assert len(lines) == 3
    # The rest of a line that was cut off, and one that is not ours, are no figures.
    cache.write_text("\n".join([*lines[:2], "[]", lines[2][:-3]]))
    second = run_cli_ok("claims", "-o", "json", "--processes", 1)
    assert f"1 of 3 runs are kept from an earlier call: {cache} (--fresh" in second.stderr
    third = run_cli_ok("claims", "-o", "json", "--processes", 1)
    assert "3 of 3 runs are kept" in third.stderr
    replies = [json.loads(result.stdout)["claims"] for result in (second, third)]
    assert replies[0] == replies[1]
    assert replies[0][:1] == json.loads(first.stdout)["claims"]
    assert messages(run_cli_ok("claims", "--fresh", "--processes", 1)) == ""


@pytest.mark.usefixtures("synthetic")
def test_figures_of_another_version_of_the_code_are_not_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_cli_ok("claims", "--processes", 1)
    monkeypatch.setattr(command, "code_version", lambda: "another")
    result = run_cli_ok("claims", "--processes", 1)
    assert messages(result) == f"kept figures of another version of the code are not used: {cache}\n"


def test_figures_of_other_traces_or_arguments_are_not_used(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    (traces / "a.csv").write_text("1")
    run, other = Run("it", _measure, (str(traces),)), Run("it", _measure, (str(traces), 1))
    kept = KeptFigures(tmp_path / "kept.jsonl", "v", traces)
    kept.add(run, {"value": 1})
    kept.close()
    again = KeptFigures(tmp_path / "kept.jsonl", "v", traces)
    again.close()
    assert again.get(run) == {"value": 1.0}
    assert again.get(other) is None
    (traces / "a.csv").write_text("12")
    changed = KeptFigures(tmp_path / "kept.jsonl", "v", traces)
    changed.close()
    assert changed.get(run) is None


def test_the_version_of_the_code_is_that_of_packages_and_modules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "deciding_module.py").write_text("A = 1")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("experiments.policies.measure", "deciding_module")
    before = code_version(names)
    assert before == code_version(names) != code_version(names[:1])
    (tmp_path / "deciding_module.py").write_text("A = 2")
    assert code_version(names) != before


@pytest.mark.usefixtures("synthetic")
def test_an_interrupted_call_keeps_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> Any:
        def stop(_progress: TaskProgress) -> None:
            raise KeyboardInterrupt

        return check(*arguments, **{**options, "progress": stop})

    with monkeypatch.context() as patch:
        patch.setattr(command, "check", interrupted)
        result = run_cli("claims", "--processes", 1)
    assert result.exit_code == 1
    assert "1 of 3 runs are kept; the same command goes on from there\n" in result.stderr
    assert "1 of 3 runs are kept from an earlier call" in run_cli_ok("claims", "--processes", 1).stderr


@pytest.mark.usefixtures("synthetic")
def test_a_cache_that_cannot_be_written_costs_no_figures(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_self: KeptFigures, _run: Run, _figures: Figures) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(KeptFigures, "add", full)
        result = run_cli_ok("claims", "--processes", 1)
    assert messages(result) == f"figures are no longer kept: {cache}: No space left on device\n"
    cache.unlink()
    cache.parent.rmdir()
    cache.parent.write_text("no folder")
    assert f"figures are not kept: {cache}: " in run_cli_ok("claims", "--processes", 1).stderr


def test_a_run_is_known_by_what_it_computes() -> None:
    for run in runs_of(experiments(Path("traces"))).values():
        # A default representation has an address, which is another one in every process.
        assert " at 0x" not in repr(run.arguments)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_quick_check_judges_every_row(tmp_path: Path) -> None:
    """The whole command, as a user runs it."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-m", "tailrace", "claims", "--quick", "-o", "json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["claims"]
    assert len(rows) == len({claim.claim_id for one in experiments() for claim in one.claims})


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
