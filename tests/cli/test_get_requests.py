"""`tailrace get requests` of many requests: limits, filters and pages."""

from __future__ import annotations

import json

import grpc
import pytest

from tailrace.cli.output import print_figures
from tailrace.cli.tables import REQUESTS, lines
from tailrace.v1.admin_pb2 import REQUEST_ORDER_OLDEST, ListRequestsRequest, RequestInfo
from tailrace.v1.types_pb2 import PHASE_ANSWERING, PHASE_REASONING
from tests.cli.conftest import Run
from tests.cli.scripted_admin import Script


def many(count: int) -> list[RequestInfo]:
    """Return requests of rising age; every third one answers."""
    return [
        RequestInfo(
            request_id=f"chatcmpl-{i:04}",
            instance_id="worker-0",
            phase=PHASE_REASONING if i % 3 else PHASE_ANSWERING,
            output_tokens=i * i,
            age_s=float(i),
        )
        for i in range(count)
    ]


def asked(script: Script) -> list[ListRequestsRequest]:
    """Return the calls that listed requests."""
    return [request for request in script.received if isinstance(request, ListRequestsRequest)]


def test_a_table_has_500_rows_and_says_how_many_there_are(run: Run, script: Script) -> None:
    script.requests = many(2_345)
    result = run("get", "requests")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 501
    assert result.stderr == "500 of 2345 requests; --limit 0 lists all\n"
    assert [call.page_size for call in asked(script)] == [500]


def test_all_are_fetched_in_pages(run: Run, script: Script) -> None:
    script.requests = many(2_345)
    result = run("get", "requests", "--limit", "0")
    assert [line.split()[0] for line in result.stdout.splitlines()[1:]] == [
        request.request_id for request in script.requests
    ]
    assert result.stderr == ""
    assert [call.page_size for call in asked(script)] == [1_000] * 3


def test_a_limit_of_several_pages(run: Run, script: Script) -> None:
    script.requests = many(2_345)
    result = run("get", "requests", "--limit", "1001")
    assert len(result.stdout.splitlines()) == 1_002
    assert result.stderr.startswith("1001 of 2345 ")
    assert [call.page_size for call in asked(script)] == [1_000, 1]


def test_a_short_table_is_complete_without_a_note(run: Run, script: Script) -> None:
    script.requests = many(3)
    result = run("get", "requests", "--limit", "3")
    assert len(result.stdout.splitlines()) == 4
    assert result.stderr == ""


def test_json_has_all_or_the_limit(run: Run, script: Script) -> None:
    script.requests = many(2_345)
    result = run("get", "requests", "-o", "json")
    assert len(json.loads(result.stdout)["requests"]) == 2_345
    assert len(result.stdout.splitlines()) == 1
    result = run("get", "requests", "-o", "json", "--limit", "7")
    assert len(json.loads(result.stdout)["requests"]) == 7
    assert result.stderr == ""


def test_filters_and_order_are_the_schedulers(run: Run, script: Script) -> None:
    script.requests = many(10)
    arguments = ("--phase", "answering", "--sort", "age", "--instance", "worker-0", "--limit", "2")
    rows = run("get", "requests", *arguments).stdout.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["chatcmpl-0009", "chatcmpl-0006"]
    (call,) = asked(script)
    assert (call.phase, call.order, call.instance_id) == (PHASE_ANSWERING, REQUEST_ORDER_OLDEST, "worker-0")


@pytest.mark.parametrize("arguments", [(), ("--limit", "3"), ("--watch",)])
def test_json_of_a_listing_that_fails_is_not_begun(
    run: Run, script: Script, arguments: tuple[str, ...]
) -> None:
    script.errors["ListRequests"] = (grpc.StatusCode.NOT_FOUND, "instance_id: no instance 'x'")
    result = run("get", "requests", "--instance", "x", "-o", "json", *arguments)
    assert result.exit_code == 1 and result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "caption"),
    [
        (("--phase", "prefill"), "no requests are in phase prefill"),
        (("--instance", "worker-9"), "no requests are running on worker-9"),
        (("--instance", "worker-0", "--phase", "prefill"), "no requests are in phase prefill on worker-0"),
    ],
)
def test_an_empty_table_names_the_filters(
    run: Run, script: Script, arguments: tuple[str, ...], caption: str
) -> None:
    script.requests = many(5)
    assert run("get", "requests", *arguments).stdout.splitlines()[1:] == [caption]


@pytest.mark.parametrize("arguments", [("--limit", "-1"), ("--phase", "sleeping"), ("--sort", "size")])
def test_wrong_options_are_refused(run: Run, script: Script, arguments: tuple[str, str]) -> None:
    result = run("get", "requests", *arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.stderr
    assert not asked(script)


def test_a_long_table_looks_like_a_short_one(capsys: pytest.CaptureFixture[str]) -> None:
    rows = many(120)
    print_figures(REQUESTS.table(rows))
    assert list(lines(REQUESTS, [rows])) == capsys.readouterr().out.splitlines()


def test_a_line_acts_on_no_terminal() -> None:
    _, line = lines(REQUESTS, [[RequestInfo(request_id="a\x1b[2Jb")]])
    assert line.startswith("a\\x1b[2Jb ")


def test_columns_grow_from_chunk_to_chunk() -> None:
    wide = RequestInfo(request_id="chatcmpl-" + "x" * 40, instance_id="worker-0")
    _, first, second, third = lines(REQUESTS, [many(1), [wide], many(1)])
    assert first.index("worker-0") < second.index("worker-0") == third.index("worker-0")
