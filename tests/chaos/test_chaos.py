"""Chaos tests: drawn faults, verdicts on answers, and a short run on a real cluster."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.chaos.answers import Answer, Ending, Verdict, judge, parse_answer
from tests.chaos.cluster import Cluster, Shape
from tests.chaos.gaps import NO_FAULT, Exposure, longest_gaps
from tests.chaos.invariants import InvariantChecker
from tests.chaos.load import Load
from tests.chaos.open_files import open_files
from tests.chaos.reconnecting import ReceivedAnswer, ResumeHeader
from tests.chaos.report import collect_figures, print_figures
from tests.chaos.schedule import EDGE_WEIGHTS, RULES, Kind, Targets, Tier, Version, draw
from tests.chaos.timeline import Timeline
from tests.harness.loadgen import StreamResult
from tests.harness.namespaces import NamespacesUnavailable, figures_of

CAST = Targets(
    {tier: [f"{tier.value}-{n}" for n in range(3)] for tier in Tier}, ["pascal", "ares"], ["ForgotReturn"]
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
RIGHT = Answer("abcd", "length", 3, 2, 1)
OTHER = Answer("axyz", "length", 3, 2, 1)


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def choice(text: str, reason: str | None = None) -> bytes:
    return event(choices=[{"text": text, "finish_reason": reason}])


USAGE = event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 2})
DONE = b"data: [DONE]\n\n"
WHOLE = choice("ab") + choice("cd", "length") + USAGE + DONE


def verdict_on(body: bytes, status: int = 200) -> Verdict:
    right = {Version.FIRST: RIGHT, Version.CHANGED: OTHER}
    return judge(StreamResult(0.0, status=status, body=HEAD + b"\r\n" + body), right)


@given(st.integers(), st.integers(0, 40), st.integers(0, 40))
def test_a_seed_draws_the_same_faults_and_a_longer_run_begins_with_them(
    seed: int, one: int, other: int
) -> None:
    shorter, longer = sorted((one, other))
    faults = list(draw(seed, longer, CAST, RULES))
    assert list(draw(seed, shorter, CAST, RULES)) == faults[:shorter]
    for fault in faults:
        rule = RULES[fault.kind]
        assert round(rule.shortest_s, 1) <= fault.seconds <= round(rule.longest_s, 1)
        tiers = (*rule.tiers, Tier.EDGE) if fault.kind in EDGE_WEIGHTS else rule.tiers
        assert not tiers or fault.target in {name for tier in tiers for name in CAST.names[tier]}
        assert fault.other != fault.target or not fault.other


def test_every_kind_is_drawn() -> None:
    assert {fault.kind for fault in draw(1, 1000, CAST, RULES)} == set(RULES)


def test_other_faults_are_those_of_the_seed_without_an_edge() -> None:
    without = Targets({**CAST.names, Tier.EDGE: []}, CAST.policies, CAST.wrong_policies)
    edges = CAST.names[Tier.EDGE]
    pairs = [*zip(draw(3, 200, CAST, RULES), draw(3, 200, without, RULES), strict=True)]
    assert all(one == other for one, other in pairs if one.target not in edges)
    assert 10 < sum(one.target in edges for one, _ in pairs) < 60
    assert {one.kind for one in draw(3, 9, CAST, {Kind.PROXY_KILLED})} == {Kind.PROXY_KILLED}


def test_only_selected_kinds_are_drawn() -> None:
    assert {fault.kind for fault in draw(1, 50, CAST, {Kind.CUT, Kind.POISON})} == {Kind.CUT, Kind.POISON}


def test_an_answer_is_parsed_from_its_events() -> None:
    assert parse_answer(HEAD + b"\r\n" + WHOLE) == RIGHT


@given(st.lists(st.integers(1, 20)))
def test_http_chunk_boundaries_do_not_matter(sizes: list[int]) -> None:
    rest, chunked = WHOLE, b""
    for size in [*sizes, len(WHOLE)]:
        part, rest = rest[:size], rest[size:]
        if part:
            chunked += b"%x\r\n%s\r\n" % (len(part), part)
    assert parse_answer(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked + b"0\r\n\r\n") == RIGHT


@pytest.mark.parametrize(
    ("body", "status", "ending"),
    [
        (WHOLE, 200, Ending.WHOLE),
        (choice("ab"), 200, Ending.CUT),
        (b"", 0, Ending.CUT),
        (choice("ab") + choice("ab") + choice("cd", "length") + USAGE + DONE, 200, Ending.WRONG),
        (choice("abcx"), 200, Ending.WRONG),
        (choice("ab") + choice("", "length") + USAGE + DONE, 200, Ending.WRONG),
        (WHOLE + DONE, 200, Ending.WRONG),
        (choice("ab") + event(error={"message": "gone"}), 200, Ending.FAILED),
        (choice("ab", "error") + DONE, 200, Ending.FAILED),
        (b'{"error": {}}', 503, Ending.REFUSED),
        (b'{"error": {}}', 500, Ending.FAILED),
    ],
)
def test_an_answer_is_judged(body: bytes, status: int, ending: Ending) -> None:
    assert verdict_on(body, status).ending is ending


def test_an_answer_is_generated_by_one_version() -> None:
    end = choice("", "length") + USAGE + DONE
    assert verdict_on(choice("abcd") + end) == Verdict(Ending.WHOLE, "", Version.FIRST)
    assert verdict_on(choice("axyz") + end) == Verdict(Ending.WHOLE, "", Version.CHANGED)
    mixed = verdict_on(choice("abyz") + end)
    assert mixed.ending is Ending.WRONG and "first: " in mixed.reason and "changed: " in mixed.reason


def numbered(run: int, first: int, *events: bytes) -> bytes:
    lines = [b"id: a.%d.%d\n%b" % (run, number, event) for number, event in enumerate(events, first)]
    return HEAD + b"\r\n" + b"".join(lines)


def connection(body: bytes, status: int = 200) -> StreamResult:
    return StreamResult(0.0, status=status, body=body)


EVENTS = (choice("ab"), choice("cd", "length"), USAGE, DONE)


def test_a_client_reconnects_for_the_missing_events() -> None:
    received = ReceivedAnswer(ResumeHeader.EVENT, "k")
    assert received.headers() == {}
    received.add_connection(connection(numbered(1, 1, *EVENTS[:1]) + b"id: a.1.2\ndata: {half"))
    assert received.headers() == {ResumeHeader.EVENT: "a.1.1"} and not received.ended
    received.add_connection(connection(b'{"error": {"message": "being resumed by a later request"}}', 409))
    received.add_connection(connection(b"", 0))
    received.add_connection(connection(numbered(7, 2, *EVENTS[1:])))
    assert received.whole and not received.violation and received.connections == 2 and received.overtaken == 1
    assert judge(received.result(), {Version.FIRST: RIGHT}).ending is Ending.WHOLE
    assert received.result().tokens == 2


def test_a_key_repeats_the_same_events() -> None:
    received = ReceivedAnswer(ResumeHeader.KEY, "k")
    received.add_connection(connection(numbered(1, 1, *EVENTS[:2])))
    assert received.headers() == {ResumeHeader.KEY: "k"}
    received.add_connection(connection(numbered(7, 1, *EVENTS)))
    assert received.whole and not received.violation
    assert judge(received.result(), {Version.FIRST: RIGHT}).ending is Ending.WHOLE


@pytest.mark.parametrize(
    ("header", "then"),
    [
        (ResumeHeader.EVENT, connection(numbered(7, 3, *EVENTS[2:]))),
        (ResumeHeader.EVENT, connection(numbered(7, 1, *EVENTS))),
        (ResumeHeader.EVENT, connection(HEAD + b"\r\n" + b"".join(EVENTS[1:]))),
        (ResumeHeader.EVENT, connection(HEAD + b"\r\n" + event(error={"message": "gone", "code": 503}))),
        (ResumeHeader.EVENT, connection(b'{"error": {}}', 404)),
        (ResumeHeader.EVENT, connection(b'{"error": {"message": "the rest is gone"}}', 409)),
        (ResumeHeader.KEY, connection(numbered(7, 1, choice("ax"), *EVENTS[1:]))),
        (ResumeHeader.KEY, connection(numbered(7, 2, *EVENTS[1:]))),
    ],
)
def test_lost_repeated_or_changed_events_are_violations(header: ResumeHeader, then: StreamResult) -> None:
    received = ReceivedAnswer(header, "k")
    received.add_connection(connection(numbered(1, 1, *EVENTS[:1])))
    received.add_connection(then)
    assert received.violation and received.ended


def test_a_gap_counts_for_a_fault_from_its_beginning_on() -> None:
    """A front end that is cut off just as it continues after a stop has not been silent for long."""
    stopped, cut = Exposure("stop", 10.0, 42.8), Exposure("cut", 42.9, 49.3)
    gaps = longest_gaps([9.98, 9.99, 42.95, 50.0, 50.02], [stopped, cut])
    assert gaps == pytest.approx({"stop": 32.95, "cut": 7.05, NO_FAULT: 0.01})


def test_a_gap_after_a_fault_is_not_of_this_fault() -> None:
    gaps = longest_gaps([1.0, 2.0, 10.0, 10.5], [Exposure("cut", 1.9, 2.1), Exposure("stop", 9.0, 9.5)])
    # The stream stalled right after the cut, which may be why.
    assert gaps == pytest.approx({"cut": 8.0, "stop": 1.0, NO_FAULT: 0.0})
    assert longest_gaps([1.0, 8.0, 15.0], [Exposure("cut", 2.0, 3.0)]) == {"cut": 6.0, NO_FAULT: 7.0}


def test_gaps_of_a_stream_without_a_fault() -> None:
    assert longest_gaps([1.0, 1.5, 3.5], []) == {NO_FAULT: 2.0}
    assert longest_gaps([1.0], []) == {NO_FAULT: 0.0}


def test_the_report_prints_enum_values_as_words(tmp_path: Path) -> None:
    timeline = Timeline(lambda event: None)
    cluster = Cluster(tmp_path, Shape("simulated", "rust", 2, 1.0, 0), timeline)
    load = Load(cluster, [], 1, timeline)
    load.tally.endings.update([Ending.WHOLE, Ending.WHOLE, Ending.CUT])
    load.tally.versions[Version.FIRST] += 2
    load.tally.gaps[str(Kind.CUT)].append(0.25)
    faults: dict[str, int] = {Kind.CUT: 1}
    invariants = InvariantChecker(cluster)
    figures = collect_figures(7, 60.0, faults, load, {"committed": 3}, 0.0, invariants, timeline)
    assert repr(figures.streams) == "{'whole': 2, 'cut off': 1}"
    assert repr(figures.faults) == f"{{'{Kind.CUT.value}': 1}}"
    text = io.StringIO()
    print_figures(figures, Console(file=text, width=150))
    assert "streams: 2 whole, 1 cut off; 0 tokens; generated by 2 first\n" in text.getvalue()
    assert "migrations: 3 committed; " in text.getvalue()
    assert "<" not in text.getvalue()


@pytest.mark.slow
@pytest.mark.fleet
async def test_a_short_run() -> None:
    """Three etcd members, every process in its own network namespace; 45 s on two cores."""
    command = [sys.executable, "-m", "tests.chaos", "--faults", "3", "--seed", "7", "-o", "json"]
    command += ["--workers", "2", "--streams", "6", "--kind", "kill", "cut", "corrupt_kv"]
    try:
        figures, errors = await figures_of(*command)
    except NamespacesUnavailable as unavailable:
        pytest.skip(str(unavailable))
    assert not figures["broken"], errors
    assert figures["streams"]["whole"] > 0


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_open_connections_are_counted_by_peer(family: socket.AddressFamily, host: str) -> None:
    with socket.create_server((host, 0), family=family) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection((host, port)), listening.accept()[0]:
            files = open_files(os.getpid())
            assert files[f"listening on {port}"] == 1
            assert files[f"established {host} port {port}"] == 2
