"""`tailrace top`, `trace` and `version`."""

from __future__ import annotations

import io
import json

import grpc
import pytest
import yaml
from click.testing import CliRunner
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from rich.console import Console

from tailrace.cli.main import main
from tailrace.cli.tables import Column, View
from tailrace.cli.top import Sample, token_rates
from tailrace.slo import Slo, assignments, read_objectives
from tailrace.v1.admin_pb2 import (
    REQUEST_ORDER_OLDEST,
    InstanceInfo,
    ListRequestsRequest,
    PolicyInfo,
    PolicyParameter,
    RecentFigures,
    RequestInfo,
)
from tests.cli.conftest import Run
from tests.cli.scripted_admin import Script


def test_top_once_prints_one_frame(run: Run) -> None:
    result = run("top", "--once")
    assert result.exit_code == 0, result.stderr
    first = result.stdout.splitlines()[0]
    # Two instances; on one of them, three requests decode at 10 ms per token.
    assert "policy least_loaded" in first
    assert "instances 2" in first
    assert "300 tokens/s" in first
    for cell in ("worker-0", "25%", "chatcmpl-aab2", "answering", "committed", "3.0 MiB"):
        assert cell in result.stdout


def test_top_as_json_has_the_same_figures(run: Run) -> None:
    document = json.loads(run("top", "--once", "-o", "json").stdout)
    assert document["policy"] == "least_loaded"
    assert document["tokens_per_s"] == 300.0
    assert [i["instance_id"] for i in document["instances"]] == ["worker-0", "worker-1"]
    assert {r["phase"] for r in document["requests"]} >= {"answering"}
    assert document["migrations"][0]["state"] == "committed"


RECENT = RecentFigures(
    answers=8,
    ttft_ms_p50=120.0,
    ttft_ms_p99=450.0,
    tpot_ms_p50=11.0,
    tpot_ms_p99=30.5,
    slo_attainment=0.75,
    moves_in=3,
    moves_out=2,
)


def test_top_shows_the_last_minute(run: Run, script: Script) -> None:
    script.recent = RECENT
    script.instances[0].recent.CopyFrom(RECENT)
    result = run("top", "--once")
    assert (
        "last minute: answers 8  SLO 75%  moves 3\nP50/P99: TTFT 120/450 ms  TPOT 11.0/30.5 ms"
        in result.stdout
    )
    lines = result.stdout.splitlines()
    (busy,) = (line.split() for line in lines if line.startswith("worker-0"))
    (idle,) = (line.split() for line in lines if line.startswith("worker-1"))
    assert {"120/450", "11.0/30.5", "75%", "3/2"} <= set(busy)
    assert not {"120/450", "75%", "3/2"} & set(idle)
    assert json.loads(run("top", "--once", "-o", "json").stdout)["recent"]["answers"] == 8


def test_top_without_answers_has_no_times(run: Run) -> None:
    shown = run("top", "--once").stdout
    assert "last minute: answers 0  moves 0" in shown and "TTFT 0" not in shown


@pytest.mark.parametrize(("order", "first"), [("name", "worker-0"), ("slo", "late"), ("moves", "busy")])
def test_top_sorts_instances(run: Run, script: Script, order: str, first: str) -> None:
    script.instances += [
        InstanceInfo(instance_id="busy", recent=RecentFigures(moves_in=9, moves_out=1)),
        InstanceInfo(instance_id="late", recent=RecentFigures(answers=4, slo_attainment=0.25)),
    ]
    lines = run("top", "--once", "--sort", order).stdout.splitlines()
    heading = next(at for at, line in enumerate(lines) if line.startswith("INSTANCE"))
    assert lines[heading + 1].split()[0] == first


def test_top_works_without_a_migration_service(run: Run, script: Script) -> None:
    script.errors["ListMigrations"] = (grpc.StatusCode.UNAVAILABLE, "no migration service responds")
    result = run("top", "--once")
    assert result.exit_code == 0, result.stderr
    assert "worker-0" in result.stdout and "committed" not in result.stdout


def test_top_of_a_large_fleet_shows_the_oldest_requests_and_the_fullest_instances(
    run: Run, script: Script
) -> None:
    del script.instances[1:]
    script.instances += [
        InstanceInfo(instance_id=f"more-{i:02}", kv_blocks_used=i, kv_blocks_total=1_000) for i in range(40)
    ]
    script.requests += [RequestInfo(request_id=f"later-{i:02}", age_s=i) for i in range(30)]
    rows = run("top", "--once").stdout
    (asked,) = (r for r in script.received if isinstance(r, ListRequestsRequest))
    assert (asked.page_size, asked.order) == (20, REQUEST_ORDER_OLDEST)
    assert "requests 32" in rows and "and 12 more" in rows
    assert "later-10" in rows and "later-09" not in rows
    assert "instances 41" in rows and "and 9 more" in rows
    # In their order, the one that is fuller than all others included.
    assert rows.index("worker-0") < rows.index("more-09") < rows.index("more-39")
    assert "more-08" not in rows


def test_top_as_json_counts_all_requests(run: Run, script: Script) -> None:
    script.requests += [RequestInfo(request_id=f"later-{i:02}", age_s=i) for i in range(30)]
    document = json.loads(run("top", "--once", "-o", "json").stdout)
    assert (len(document["requests"]), document["requests_total"]) == (20, 32)


def _sample(at_s: float, **tokens: int) -> Sample:
    instances = tuple(InstanceInfo(instance_id=i, generated_tokens=n) for i, n in tokens.items())
    return Sample(at_s, "p", instances, (), 0, (), RecentFigures())


def test_rates_are_derived_from_counters() -> None:
    assert token_rates(_sample(10, a=100, b=0), _sample(12, a=300, b=0)) == {"a": 100.0, "b": 0.0}


def test_rates_of_restarted_and_new_workers() -> None:
    last = _sample(12, a=50, c=7)
    assert token_rates(_sample(10, a=300), last) == {"a": 25.0, "c": 0.0}


def _one_span() -> bytes:
    traces = TracesData()
    span = (
        traces.resource_spans.add()
        .scope_spans.add()
        .spans.add(
            name="request",
            trace_id=bytes(range(16)),
            span_id=bytes(range(8)),
            start_time_unix_nano=1_000_000_000,
            end_time_unix_nano=1_250_000_000,
        )
    )
    span.links.add(trace_id=b"\xff" * 16, span_id=b"\xfe" * 8)
    return traces.SerializeToString()


def test_trace_json_has_hexadecimal_ids(run: Run, script: Script) -> None:
    script.traces = _one_span()
    document = json.loads(run("trace", "aaa1", "-o", "json").stdout)
    span = document["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    assert span["traceId"] == bytes(range(16)).hex()
    assert span["spanId"] == bytes(range(8)).hex()
    assert "parentSpanId" not in span
    assert span["links"] == [{"traceId": "ff" * 16, "spanId": "fe" * 8}]


def test_trace_prints_a_tree(run: Run, script: Script) -> None:
    script.traces = _one_span()
    result = run("trace", "aaa1")
    assert result.exit_code == 0, result.stderr
    assert "request" in result.stdout


@pytest.mark.parametrize("output", ["table", "json"])
def test_version(output: str) -> None:
    result = CliRunner().invoke(main, ["version", "-o", output])
    assert result.exit_code == 0
    assert "tailrace" in result.stdout
    if output == "json":
        assert set(json.loads(result.stdout)) == {"tailrace", "python", "vllm", "ucxx"}


def test_tables_do_not_act_on_the_terminal() -> None:
    """What a peer says is shown, and moves no cursor and begins no line."""
    view = View[InstanceInfo](name="models", columns=(Column("MODEL", lambda i: i.model),), empty="none")
    console = Console(file=io.StringIO(), width=80)
    console.print(view.table([InstanceInfo(model="a\x1b[2Jb\nc")]))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[1].strip() == r"a\x1b[2Jb\nc"


@pytest.mark.parametrize(
    "command", [("top", "--once"), ("get", "instances"), ("get", "requests"), ("version",)]
)
def test_yaml_has_the_same_figures(run: Run, command: tuple[str, ...]) -> None:
    if command == ("version",):
        outputs = [CliRunner().invoke(main, [*command, "-o", kind]).stdout for kind in ("json", "yaml")]
    else:
        outputs = [run(*command, "-o", kind).stdout for kind in ("json", "yaml")]
    assert yaml.safe_load(outputs[1]) == json.loads(outputs[0])
    assert outputs[1].startswith("---\n")


@pytest.mark.parametrize(
    ("kind", "further"),
    [("instances", "INCARNATION"), ("requests", "FRONT END"), ("migrations", "STEP WAIT MS")],
)
def test_wide_tables_have_further_columns(run: Run, kind: str, further: str) -> None:
    usual, wide = (run("get", kind, "-o", output).stdout.splitlines() for output in ("table", "wide"))
    assert further in wide[0] and further not in usual[0]
    assert wide[0].startswith(usual[0].split()[0]) and len(wide) == len(usual) > 1


def test_wide_is_offered_where_there_is_more(run: Run) -> None:
    assert run("get", "pools", "-o", "wide").exit_code == 2


def test_a_live_view_needs_a_terminal(run: Run) -> None:
    """In a pipe it would show nothing until its end."""
    for arguments, instead in ((("top",), "--once"), (("get", "requests", "--watch"), "-o json")):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "stdout is no terminal" in result.stderr and instead in result.stderr


def test_top_has_no_headings_of_nothing(run: Run, script: Script) -> None:
    del script.migrations[:], script.requests[:]
    shown = run("top", "--once").stdout
    assert "INSTANCE" in shown and "MIGRATION" not in shown and "REQUEST" not in shown


def test_parameters_of_a_policy_are_lines_of_their_own(run: Run, script: Script) -> None:
    parameters = [PolicyParameter(name=name, value="1") for name in ("first", "second")]
    script.policies.append(PolicyInfo(name="mine", active=True, summary="moves", parameters=parameters))
    lines = run("get", "policies").stdout.splitlines()
    (first,) = (at for at, line in enumerate(lines) if line.startswith("mine"))
    assert "first=1" in lines[first] and lines[first + 1].strip() == "second=1"


def test_objectives_are_shown_with_their_units(run: Run, script: Script) -> None:
    result = run("set", "slo", "ttft=2", "tpot=150")
    assert "tpot is 150s for each token; milliseconds are written tpot=150ms" in result.stderr
    assert "milliseconds" not in run("set", "slo", "tpot=150ms", "pace=0.1").stderr
    assert assignments(Slo(ttft_s=2.0, tpot_s=0.15, pace_s=90.0)) == "ttft=2s tpot=150ms pace=90s"
    assert read_objectives({"tpot": "150ms", "ttft": "2s"}) == {"tpot": 0.15, "ttft": 2.0}
