"""`tailrace profile` and `tailrace get profiles`."""

from __future__ import annotations

import json

import grpc
import pytest

from tailrace.v1 import admin_pb2, profile_pb2
from tests.cli.conftest import Run
from tests.cli.scripted_admin import Script

FOUND = profile_pb2.MeasuredProfile(
    kind="vllm-tiny-cpu-1a2b3c4d",
    instance_id="worker-0",
    ttft=profile_pb2.TtftFit(base_s=0.004, s_per_token=1e-5, r_squared=0.998, samples=9),
    decode=profile_pb2.DecodeFit(
        base_ms=2.5, ms_per_request=0.05, ms_per_kv_token=1e-4, error=0.03, samples=20
    ),
    tpot_s=0.1,
    max_running_tokens=131072,
)


@pytest.fixture(autouse=True)
def script_profiles(script: Script) -> None:
    script.profiles = [FOUND]
    script.profile_events = [
        profile_pb2.ProfileEvent(message="warming up"),
        profile_pb2.ProfileEvent(profile=FOUND),
    ]


def profile_requests(script: Script) -> list[admin_pb2.AdminProfileRequest]:
    return [received for received in script.received if isinstance(received, admin_pb2.AdminProfileRequest)]


def test_progress_goes_to_stderr_and_figures_to_stdout(run: Run, script: Script) -> None:
    result = run("profile", "worker-0", "--budget", "5", "--force", "-o", "json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == "worker-0: warming up\n"
    (found,) = json.loads(result.stdout)["profiles"]
    assert found["kind"] == FOUND.kind and found["decode"]["base_ms"] == 2.5
    assert profile_requests(script) == [
        admin_pb2.AdminProfileRequest(instance_id="worker-0", force=True, budget_s=5.0)
    ]


def test_without_a_name_one_idle_instance_of_each_kind_is_profiled(run: Run, script: Script) -> None:
    busy, other = script.instances
    other.state = busy.state
    busy.profile_kind = other.profile_kind = "a"
    script.instances.append(
        admin_pb2.InstanceInfo(instance_id="worker-2", state=busy.state, profile_kind="b")
    )
    script.instances.append(admin_pb2.InstanceInfo(instance_id="worker-3", state=busy.state))
    assert run("profile").exit_code == 0
    assert [each.instance_id for each in profile_requests(script)] == ["worker-1", "worker-2"]


def test_without_an_instance_to_profile_is_an_error(run: Run, script: Script) -> None:
    result = run("profile")
    assert result.exit_code == 1 and "no instance to profile" in result.stderr


def test_a_busy_instance_is_an_error(run: Run, script: Script) -> None:
    script.errors["Profile"] = (grpc.StatusCode.FAILED_PRECONDITION, "worker-0 carries 3 requests")
    result = run("profile", "worker-0")
    assert result.exit_code == 1
    assert (
        result.stderr.startswith("tailrace: worker-0 carries 3 requests") and result.stderr.count("\n") == 1
    )


def test_a_stream_that_ends_early_is_an_error(run: Run, script: Script) -> None:
    script.profile_events.pop()
    result = run("profile", "worker-0")
    assert result.exit_code == 1 and "without a profile" in result.stderr


def test_get_profiles(run: Run) -> None:
    result = run("get", "profiles")
    assert result.exit_code == 0, result.stderr
    for cell in (FOUND.kind, "worker-0", "2.55", "131072 at 0.1 s", "0.998", "3.0%"):
        assert cell in result.stdout
    assert (
        json.loads(run("get", "profiles", "-o", "json").stdout)["profiles"][0]["max_running_tokens"] == 131072
    )
