"""`tailrace size`: the least number of instances that keeps the SLO."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from simulator.cli.size import size_command
from simulator.scenario import SimulatedFleet
from simulator.sizing import Kind, _least
from simulator.workloads.resolve import WorkloadOptions, resolve_workload
from tests.simulator.command_lines import profile, workload


def run(*arguments: object) -> Result:
    """Run the command with these arguments."""
    return CliRunner().invoke(size_command, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the workload."""
    return tmp_path_factory.mktemp("size")


@pytest.fixture(scope="module")
def arguments(folder: Path) -> tuple[object, ...]:
    """Return arguments for two policies, in one process."""
    load = workload(folder, count=60), "--rate", 60
    slo = "--slo-ttft", 0.3, "--slo-tpot", 0.1, "--attainment", 90
    policies = "--policy", "least_loaded", "--policy", "round_robin"
    return (*load, *slo, *policies, "--profile", profile(folder), "--seeds", 2, "--processes", 1)


@pytest.fixture(scope="module")
def reply(arguments: tuple[object, ...]) -> dict[str, Any]:
    """Return the JSON output."""
    result = run(*arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_the_search_finds_the_edge_from_any_guess() -> None:
    for least, most, guess in itertools.product((0, 1), (1, 2, 3, 7, 20), range(24)):
        for answer in (*range(least, most + 1), None):
            search, tried = _least(least, most, guess), []
            probe = next(search)
            with pytest.raises(StopIteration) as end:
                while True:
                    assert least <= probe <= most and probe not in tried
                    tried.append(probe)
                    probe = search.send(answer is not None and probe >= answer)
            assert end.value.value == answer
            assert len(tried) <= 10


def test_kinds() -> None:
    assert Kind.of("a").fleet(3, SimulatedFleet("", 1)) == SimulatedFleet("a:3", 3)
    mixed = Kind.of("a:4, b")
    assert (mixed.base, mixed.name, mixed.least, str(mixed)) == ("a:4", "b", 0, "a:4,b")
    assert mixed.fleet(2, SimulatedFleet("", 1)) == SimulatedFleet("a:4,b:2", 6)
    assert mixed.fleet(0, SimulatedFleet("", 1)) == SimulatedFleet("a:4", 4)
    for text in ("a:4", "a:4,b:2", "a,b"):
        with pytest.raises(ValueError, match="COUNT"):
            Kind.of(text)


def test_the_number_found_is_enough_and_one_less_is_not(reply: dict[str, Any]) -> None:
    assert [each["policy"] for each in reply["sizes"]] == ["least_loaded", "round_robin"]
    for each in reply["sizes"]:
        found = each["instances"]
        reached = {count["instances"]: count["mean"]["attainment"] for count in each["counts"]}
        assert found > 1 and reached[found] >= 0.9 > reached[found - 1]
        assert found - 2 in reached or found == 2
        assert list(reached) == sorted(reached)
    least = min(each["instances"] for each in reply["sizes"])
    assert [each["instances"] for each in reply["recommended"]] == [least]


def test_the_verdict_is_that_of_the_interval(reply: dict[str, Any]) -> None:
    for each in reply["sizes"]:
        for count in each["counts"]:
            mean, half = count["mean"]["attainment"], count["half_width"]["attainment"]
            expected = "kept" if mean - half >= 0.9 else "missed" if mean + half < 0.9 else "unsure"
            assert count["slo"] == expected


def test_table_and_report(arguments: tuple[object, ...], reply: dict[str, Any], folder: Path) -> None:
    page = folder / "size.html"
    result = run(*arguments, "--report", page)
    assert result.exit_code == 0, result.output
    best = reply["recommended"][0]
    assert (
        f"needed: {best['instances']} instances of {best['profile']}, under {best['policy']}" in result.stdout
    )
    html = page.read_text()
    assert f"<b>{best['instances']} instances" in html and "SLO attainment (%)" in html


def test_too_few_to_try_is_a_failure(arguments: tuple[object, ...]) -> None:
    result = run(*arguments, "--most", 1)
    assert result.exit_code == 1
    assert "under least_loaded are too few" in result.stderr and "--most 1" in result.stderr


def test_a_base_that_is_enough_needs_none_more(arguments: tuple[object, ...], folder: Path) -> None:
    path = profile(folder)
    result = run(*arguments, "--profile", f"{path}:8,{path}", "-o", "json")
    assert result.exit_code == 0, result.output
    based = [each for each in json.loads(result.stdout)["sizes"] if "," in each["profile"]]
    assert [each["instances"] for each in based] == [0, 0]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (("--profile", "llama-3.1-8b-h100:3"), "the last kind has no COUNT"),
        (("--profile", "nothing"), "--profile: no profile"),
        (("--policy", "nobody"), "--policy: unknown"),
        ((), "sharegpt is generated and needs a rate"),
    ],
)
def test_wrong_usage(given: tuple[str, ...], complaint: str) -> None:
    result = run("sharegpt", *given)
    assert result.exit_code == 2 and complaint in result.stderr


def test_seeds_pair_arrivals_and_lengths_anew(folder: Path) -> None:
    spec = workload(folder, count=60)
    plain, zero, one = (
        resolve_workload(spec, WorkloadOptions(seed=seed, shuffle=shuffle)).requests
        for seed, shuffle in ((1, False), (0, True), (1, True))
    )
    assert plain == zero != one
    assert [request.arrival_s for request in one] == [request.arrival_s for request in zero]
    assert sorted(r.output_tokens for r in one) == sorted(r.output_tokens for r in zero)
