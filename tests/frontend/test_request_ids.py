"""A client's request id ends at the front end; everything behind it has a short one of ours."""

from __future__ import annotations

import pytest

from frontend_svc.admission import Refusal
from tailrace.request_ids import (
    MAX_BYTES,
    is_own_id,
    matching,
    name_at_edge,
    own_id,
    problem_with,
    read_name_at_edge,
)
from tailrace.v1 import worker_pb2
from tailrace.wire.outputs import EngineCoreOutput, FinishReason, encode_outputs
from tailrace.wire.requests import read_full_request
from tests.frontend.conftest import Rig, eventually, place_wait_ends
from tests.frontend.scripted_worker import FINISHED, PREFILL_DONE, outputs

RANDOM = "0123456789abcdef0123456789abcdef"
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    "name", [f"chatcmpl-{RANDOM}", f"cmpl-{RANDOM}-0", "chatcmpl-c6136f31", f"resp_{RANDOM}"]
)
def test_random_id_stays(name: str) -> None:
    own = own_id(name)
    assert own.startswith(f"{name}-") and own != own_id(name)
    assert is_own_id(own) and is_own_id(f"0_{own}")


@pytest.mark.parametrize("chosen", ["", RANDOM, "job", "my own-7", "chatcmpl-job-3", f"{RANDOM}.0badcafe"])
def test_an_edges_id_says_whose_it_is_and_is_found_by_the_clients(chosen: str) -> None:
    name, key_id = read_name_at_edge(f"cmpl-{name_at_edge(chosen, '5f0c22ab91de')}")
    assert key_id == "5f0c22ab91de"
    own = own_id(name)
    assert is_own_id(own) and own.startswith(f"{name}-")
    if chosen:
        assert matching(chosen, [own]) == [own]


@pytest.mark.parametrize(
    "name",
    ["cmpl-job.5f0c22ab91de", f"cmpl-{RANDOM}", f"cmpl-{RANDOM}.", f"embd-{RANDOM}.0a", f"{RANDOM}.0a"],
)
def test_what_no_edge_made_says_nothing(name: str) -> None:
    assert read_name_at_edge(name) == (name, "")


@pytest.mark.parametrize(
    ("chosen", "name"),
    [
        ("job", "chatcmpl-job"),
        ("job", "cmpl-job-3"),
        ("job-7", "chatcmpl-job-7"),
        ("job-7", "cmpl-job-7-0"),
        ("a\nb " + "x" * 200, "chatcmpl-a\nb " + "x" * 200),
        ("é\U0001f600", "next-version-é\U0001f600"),
        ("\ud800", "chatcmpl-\ud800"),
    ],
)
def test_chosen_id_becomes_a_short_one_that_is_found_by_it(chosen: str, name: str) -> None:
    own = own_id(name)
    assert len(own) < 60 and own.isascii() and own.isprintable()
    assert is_own_id(own) and not is_own_id(f"{name}-01234567") and own != own_id(name)
    if not name.startswith("next-version"):
        others = [own_id("chatcmpl-other"), own_id("cmpl-job-70-0")]
        assert own in matching(chosen, [*others, own]) and own in matching(name, [*others, own])
    assert matching(own[:-3], [own]) == matching(own, [own]) == [own]


def test_what_an_id_may_be() -> None:
    allowed = [("request_id", "a" * MAX_BYTES), ("session_id", "Auftrag 7/é"), ("session_id", "")]
    assert problem_with(allowed) == ""
    assert problem_with([*allowed, ("a", "é" * MAX_BYTES)]) == f"a must have at most {MAX_BYTES} bytes."
    for text in ("a\tb", "a\x9bb", "\ud800"):
        assert problem_with([*allowed, ("b", text)]) == "b must consist of printable characters."


async def test_workers_get_ours_and_the_api_server_its_own(rig: Rig) -> None:
    worker = await rig.worker("a")
    await rig.front.ready()
    chosen = "chatcmpl-" + "j" * 200
    name = f"{chosen}-0badcafe"
    headers = {"traceparent": TRACEPARENT, "tracestate": "v=" + "s" * 600, "tailrace-tenant": "t"}
    await rig.front.add(name, chosen=chosen, trace_headers=headers)
    await rig.front.add("plain")
    submit, plain = await worker.submitted(), await worker.submitted()
    assert plain.request_id == "plain" and is_own_id(submit.request_id)
    assert "jjj" not in str(submit) and len(submit.frames[0]) < 350
    request = read_full_request(list(submit.frames))
    assert request.request_id == submit.request_id and request.external_req_id is None
    assert request.trace_headers == {"traceparent": TRACEPARENT} == {"traceparent": submit.traceparent}
    # One step of both.
    step = worker_pb2.StepOutputs(
        frames=encode_outputs([EngineCoreOutput(s.request_id, [7]) for s in (submit, plain)]),
        handles=[submit.handle, plain.handle],
        epochs=[0, 0],
        first_indices=[0, 0],
        counts=[1, 1],
        token_ids=[7, 7],
        flags=[PREFILL_DONE, PREFILL_DONE],
    )
    worker.send(worker_pb2.AttachDown(outputs=step))
    assert await rig.front.tokens_of(name, 1) == await rig.front.tokens_of("plain", 1) == [7]
    worker.send(outputs(submit, [8], 1, FINISHED))
    assert (await rig.front.end_of(name)).finish_reason == FinishReason.STOP
    assert set(rig.front.tokens) == {name, "plain"}
    # An abort names the request as the API server does.
    await rig.front.add(name, chosen=chosen)
    again = await worker.submitted()
    assert again.request_id != submit.request_id
    await rig.front.abort(name)
    assert list((await worker.expect("abort")).abort.handles) == [again.handle]
    await eventually(lambda: rig.engine.table.find(name) is None)


@pytest.mark.parametrize(
    ("chosen", "session_id", "reason"),
    [
        ("chatcmpl-" + "j" * 257, None, "request_id must have at most 256 bytes."),
        ("chatcmpl-a\x1b[31m", None, "request_id must consist of printable characters."),
        ("chatcmpl-a", "s" * 257, "session_id must have at most 256 bytes."),
        ("chatcmpl-a", "\r", "session_id must consist of printable characters."),
    ],
)
async def test_wrong_id_is_refused_before_it_costs_anything(
    rig: Rig, chosen: str, session_id: str | None, reason: str
) -> None:
    worker = await rig.worker("a")
    await rig.front.ready()
    await rig.front.add(f"{chosen}-0badcafe", chosen=chosen, session_id=session_id)
    end = await rig.front.end_of(f"{chosen}-0badcafe")
    assert Refusal.decode(end.stop_reason) == Refusal(400, reason)
    assert worker.received.empty() and not len(rig.engine.table)


@place_wait_ends
async def test_error_of_a_renamed_request_has_the_api_servers_name(rig: Rig) -> None:
    await rig.worker("a")
    await rig.front.ready()
    rig.members.draining = frozenset({"a"})
    rig.members.changed()
    await rig.front.add("chatcmpl-job-0badcafe", chosen="chatcmpl-job")
    end = await rig.front.end_of("chatcmpl-job-0badcafe")
    refusal = Refusal.decode(end.stop_reason)
    assert refusal is not None and refusal.status == 503
