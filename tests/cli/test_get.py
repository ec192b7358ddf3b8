"""`tailrace get`: tables, and one JSON object for programs."""

from __future__ import annotations

import json

import pytest

from tailrace.v1.admin_pb2 import PolicyParameter, RankInfo
from tests.cli.conftest import Run
from tests.cli.scripted_admin import Script

KINDS = {
    "instances": ("worker-0", "INSTANCE"),
    "pools": ("prefill", "POOL"),
    "stages": ("8192", "BELOW"),
    "requests": ("chatcmpl-aaa1", "PHASE"),
    "migrations": ("committed", "PAUSE MS"),
    "policies": ("least_loaded", "ACTIVE"),
    "services": ("127.0.0.1:8000 (asleep)", "LEADER"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_table_output(run: Run, kind: str) -> None:
    cell, heading = KINDS[kind]
    result = run("get", kind)
    assert result.exit_code == 0, result.output
    assert cell in result.stdout
    assert heading in result.stdout.splitlines()[0]


@pytest.mark.parametrize("kind", KINDS)
def test_json_is_one_object_with_the_kind_as_its_only_key(run: Run, kind: str) -> None:
    result = run("get", kind, "-o", "json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert list(document) == [kind]
    assert document[kind]
    assert result.stderr == ""


@pytest.mark.parametrize("kind", KINDS)
def test_empty_listings(run: Run, script: Script, kind: str) -> None:
    for rows in (script.instances, script.requests, script.migrations, script.policies):
        rows.clear()
    script.stages.clear()
    script.services.clear()
    assert json.loads(run("get", kind, "-o", "json").stdout) == {kind: []}
    assert "no " in run("get", kind).stdout


def test_json_of_a_request(run: Run) -> None:
    request = json.loads(run("get", "requests", "-o", "json").stdout)["requests"][0]
    assert request["instance_id"] == "worker-0"
    assert request["phase"] == "reasoning"
    assert request["state"] == "running"
    assert request["epoch"] == 2
    assert (request["prompt_tokens"], request["output_tokens"]) == (40, 600)
    assert request["migrating"] is False


def test_json_keeps_large_numbers_and_has_null_for_no_pool(run: Run) -> None:
    first, second = json.loads(run("get", "instances", "-o", "json").stdout)["instances"]
    assert first["generated_tokens"] == 2**40
    assert (first["pool"], second["pool"]) == ("prefill", None)
    assert second["state"] == "suspect"


def test_cached_blocks_on_the_device_and_in_host_memory(run: Run, script: Script) -> None:
    script.instances[0].cached_blocks, script.instances[0].cached_host_blocks = 40, 700
    script.instances[1].cached_blocks = 30
    rows = run("get", "instances").stdout.splitlines()
    first, second = (next(row for row in rows if name in row) for name in ("worker-0", "worker-1"))
    assert " 40+700 " in first and " 30 " in second and "30+" not in second


def test_json_shows_where_to_scrape_an_instance(run: Run, script: Script) -> None:
    script.instances[0].metrics_address = "node-7:9105"
    first, second = json.loads(run("get", "instances", "-o", "json").stdout)["instances"]
    assert (first["metrics_address"], second["metrics_address"]) == ("node-7:9105", "")


def test_json_shows_the_ranks_of_an_instance(run: Run, script: Script) -> None:
    script.instances[0].tensor_parallel_size = 2
    script.instances[0].ranks.extend(RankInfo(process=n, hardware="NVIDIA L40S") for n in (71, 72))
    first, second = json.loads(run("get", "instances", "-o", "json").stdout)["instances"]
    assert first["tensor_parallel_size"] == 2
    assert first["ranks"] == [{"process": n, "hardware": "NVIDIA L40S"} for n in (71, 72)]
    assert second["ranks"] == []


def test_json_contains_the_rounds_of_a_migration(run: Run) -> None:
    migration = json.loads(run("get", "migrations", "-o", "json").stdout)["migrations"][0]
    assert [entry["blocks"] for entry in migration["rounds"]] == [38, 2]
    assert migration["pause_steps"] == 1.5


def test_policy_parameters_have_their_types(run: Run, script: Script) -> None:
    active, other = script.policies
    active.parameters.extend(
        [
            PolicyParameter(name="quantum", type="int", unit="tokens", default="500", value="200"),
            PolicyParameter(name="share", type="float", default="0.5", value="0.25"),
            PolicyParameter(name="eager", type="bool", default="false", value="true"),
        ]
    )
    other.parameters.append(PolicyParameter(name="rule", type="str", default="paper"))
    first, second = json.loads(run("get", "policies", "-o", "json").stdout)["policies"]
    assert [(p["name"], p["default"], p["value"]) for p in first["parameters"]] == [
        ("quantum", 500, 200),
        ("share", 0.5, 0.25),
        ("eager", False, True),
    ]
    assert (second["parameters"][0]["default"], second["parameters"][0]["value"]) == ("paper", None)
    table = run("get", "policies").stdout
    assert "quantum=200" in table and "share=0.25" in table and "rule" not in table


def test_requests_of_one_instance(run: Run) -> None:
    document = json.loads(run("get", "requests", "--instance", "worker-1", "-o", "json").stdout)
    assert [request["request_id"] for request in document["requests"]] == ["chatcmpl-aab2"]


def test_migrations_are_limited(run: Run, script: Script) -> None:
    script.migrations.extend(script.migrations * 3)
    document = json.loads(run("get", "migrations", "--limit", "2", "-o", "json").stdout)
    assert len(document["migrations"]) == 2
