"""`tailrace rollout`: requests to the server, and output."""

from __future__ import annotations

import json

import grpc
import pytest

from tailrace.service.channels import FROM_SERVER
from tailrace.v1 import admin_pb2
from tests.cli.conftest import Run
from tests.cli.scripted_admin import Script

OLD, NEW = "91b04c77d2aa", "3fa2c9d01b6e"
DONE = f"done: new requests go to {NEW}, and no request of {OLD} is left"


def event(
    state: admin_pb2.RolloutState.ValueType, message: str, done: bool = False, reason: str = ""
) -> admin_pb2.RolloutEvent:
    info = admin_pb2.RolloutInfo(
        state=state, before=OLD, new=NEW, message=message, begun_s=100.5, reason=reason
    )
    return admin_pb2.RolloutEvent(rollout=info, done=done)


@pytest.fixture(autouse=True)
def events(script: Script) -> None:
    script.rollout = event(admin_pb2.ROLLOUT_STATE_PREPARING, "preparing: f0").rollout
    script.rollout_events = [
        event(admin_pb2.ROLLOUT_STATE_DRAINING, "12 requests left; draining w0"),
        event(admin_pb2.ROLLOUT_STATE_DONE, DONE, done=True),
    ]
    script.models = [
        admin_pb2.ModelInfo(
            name="chat",
            frontend_ids=["f0"],
            takes=NEW,
            versions=[
                admin_pb2.ModelVersion(
                    fingerprint=NEW,
                    paths=["/models/2"],
                    instance_ids=["w2", "w3"],
                    warm=2,
                    requests=7,
                    takes_new=True,
                ),
                admin_pb2.ModelVersion(
                    fingerprint=OLD, paths=["/models/1"], instance_ids=["w0"], requests=12
                ),
            ],
            rollout=script.rollout_events[0].rollout,
        ),
        admin_pb2.ModelInfo(name="embed", frontend_ids=["f1"]),
    ]


def test_start_prints_progress_and_result(run: Run, script: Script) -> None:
    result = run("rollout", "start", "chat", "--to", NEW[:6])
    assert result.exit_code == 0
    assert result.stdout == f"chat: {DONE}\n"
    assert result.stderr == "chat: 12 requests left; draining w0\n"
    assert script.received == [
        admin_pb2.RolloutRequest(model="chat", to=NEW[:6], prepare_s=60.0),
        admin_pb2.WatchRolloutRequest(model="chat", begun_s=100.5),
    ]


def test_start_json(run: Run) -> None:
    document = json.loads(run("rollout", "start", "chat", "--to", NEW, "-o", "json").stdout)
    assert (document["model"], document["rollout"]["state"], document["rollout"]["new"]) == (
        "chat",
        "done",
        NEW,
    )


def test_a_failed_rollout_is_an_error(run: Run, script: Script) -> None:
    message = "given up: f0: connected to no instance; new requests go to 91b04c77d2aa as before"
    script.rollout_events = [
        event(admin_pb2.ROLLOUT_STATE_FAILED, message, done=True, reason="f0: connected")
    ]
    result = run("rollout", "start", "chat", "--to", NEW)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"tailrace: chat: {message}" in result.stderr


def test_a_refused_rollout_prints_the_reason(run: Run, script: Script) -> None:
    script.errors["Rollout"] = (grpc.StatusCode.FAILED_PRECONDITION, "no instance of 3fa2 is warm: w2 stops")
    result = run("rollout", "start", "chat", "--to", NEW)
    assert result.exit_code == 1
    assert "no instance of 3fa2 is warm: w2 stops; tailrace rollout status shows" in result.stderr


def test_a_rollout_continues_after_the_timeout(run: Run, script: Script) -> None:
    del script.rollout_events[1:]
    script.errors["WatchRollout"] = (grpc.StatusCode.DEADLINE_EXCEEDED, "")
    result = run("rollout", "start", "chat", "--to", NEW, "--timeout", "5")
    assert result.exit_code == 1
    assert (
        "not finished after 5 s, it continues (preparing: f0); tailrace rollout status chat" in result.stderr
    )


def test_a_lost_scheduler_is_retried(run: Run, script: Script) -> None:
    script.errors["WatchRollout"] = (grpc.StatusCode.UNAVAILABLE, "no leader")
    script.error_metadata = (FROM_SERVER,)
    script.failures["WatchRollout"] = 2
    result = run("rollout", "start", "chat", "--to", NEW)
    assert (result.exit_code, result.stdout) == (0, f"chat: {DONE}\n")
    assert result.stderr.count("chat: no leader; retrying") == 2
    del script.failures["WatchRollout"]
    result = run("rollout", "start", "chat", "--to", NEW, "--timeout", "1")
    assert result.exit_code == 1 and not result.stdout


def test_undo_waits_for_its_completion(run: Run, script: Script) -> None:
    result = run("rollout", "undo", "chat", "--prepare-timeout", "5")
    assert result.exit_code == 0 and result.stdout == f"chat: {DONE}\n"
    assert script.received[0] == admin_pb2.UndoRolloutRequest(model="chat", prepare_s=5.0)


def test_undo_during_preparation_completes_at_once(run: Run, script: Script) -> None:
    message = "given up: an operator took it back; new requests go to 91b04c77d2aa as before"
    script.rollout = event(admin_pb2.ROLLOUT_STATE_FAILED, message, reason="an operator took it back").rollout
    result = run("rollout", "undo", "chat")
    assert result.exit_code == 0 and result.stdout == f"chat: {message}\n"
    assert len(script.received) == 1


def test_status(run: Run) -> None:
    lines = run("rollout", "status").stdout.splitlines()
    assert lines[0].split() == [
        "MODEL", "FINGERPRINT", "NEW", "REQUESTS", "INSTANCES", "WARM", "REQUESTS", "PATH",
    ]  # fmt: skip
    assert lines[1].split() == ["chat", NEW, "yes", "w2,", "w3", "2", "7", "/models/2"]
    assert lines[2].split() == ["chat", OLD, "-", "w0", "0", "12", "/models/1"]
    assert lines[3].split() == ["embed", "-", "-", "-", "0", "0", "-"]
    assert lines[4] == "chat: 12 requests left; draining w0"
    (only,) = json.loads(run("rollout", "status", "embed", "-o", "json").stdout)["models"]
    assert (only["name"], only["rollout"], only["versions"]) == ("embed", None, [])
    result = run("rollout", "status", "nope")
    assert result.exit_code == 1
    assert "no front end serves 'nope'; they serve: chat, embed" in result.stderr


def test_forget(run: Run, script: Script) -> None:
    assert run("rollout", "forget", "chat").stdout == "chat: front ends use their own --model\n"
    assert script.received == [admin_pb2.ForgetRolloutRequest(model="chat")]
    assert json.loads(run("rollout", "forget", "chat", "-o", "json").stdout) == {
        "model": "chat",
        "forgotten": True,
    }


def test_warning_about_few_warm_instances(run: Run, script: Script) -> None:
    script.rollout.warning = "1 warm of 3fa2c9d01b6e will replace 50 of 91b04c77d2aa"
    result = run("rollout", "start", "chat", "--to", NEW, "--min-warm", "1")
    assert result.exit_code == 0
    assert "chat: warning: 1 warm of 3fa2c9d01b6e will replace 50 of 91b04c77d2aa" in result.stderr
    assert isinstance(script.received[0], admin_pb2.RolloutRequest) and script.received[0].min_warm == 1
    assert "warning" in run("rollout", "undo", "chat").stderr
