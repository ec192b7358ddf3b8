"""API keys: shown once, stored as hashes, found by their value, and invalid once revoked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cli.main import main
from tailrace.tenancy.file import KeyFile, KeyFileUnusable, read_keys
from tailrace.tenancy.keys import KeyIndex, Tenant, TenantKeys


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def run(file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["keys", *arguments, "--file", str(file)])


def make(file: Path, *arguments: str) -> str:
    result = run(file, "make", *arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout.strip()


def test_only_the_exact_key_is_found() -> None:
    tenant_keys, key = TenantKeys(tenants=(Tenant(name="a"),)).with_key("a", "now")
    index = KeyIndex(tenant_keys)
    owner = index.holder(key)
    assert owner is not None and owner.tenant.name == "a"
    for wrong in (key[:-1], key + "x", key.upper(), "", "sk-tailrace--", "sk-tailrace-x-y", "a-b-c-d"):
        assert index.holder(wrong) is None


def test_secret_is_not_stored(file: Path) -> None:
    key = make(file, "a")
    stored = file.read_text()
    # The secret may contain "-".
    key_id, secret = key.removeprefix("sk-tailrace-").split("-", 1)
    assert key_id in stored and secret not in stored
    assert file.stat().st_mode & 0o007 == 0
    listed = run(file, "list", "-o", "json").stdout
    assert secret not in listed and json.loads(listed)["keys"][0]["key_id"] in key


def test_caches_are_shared_by_choice_only(file: Path) -> None:
    for tenant in ("a", "b", "c"):
        make(file, tenant)
    for tenant in ("b", "c"):
        run(file, "make", tenant, "--no-key", "--shared-cache", "a")
    a, b, c = read_keys(file).tenants
    assert len({a.cache_salt(None), b.cache_salt(None), a.cache_salt("x"), b.cache_salt("x")}) == 4
    assert [b.cache_salt(salt) for salt in (None, "x")] == [c.cache_salt(salt) for salt in (None, "x")]
    run(file, "make", "c", "--no-key", "--shared-cache", "")
    assert read_keys(file).tenant("c") == Tenant(name="c")


@given(*[st.tuples(st.text(), st.text(), st.none() | st.text("/abc1", min_size=1))] * 2)
def test_salts_of_different_caches_differ(
    first: tuple[str, str, str | None], second: tuple[str, str, str | None]
) -> None:
    salts = [Tenant(name=name, shared_cache=cache).cache_salt(salt) for name, cache, salt in (first, second)]
    caches = [(cache or name, bool(cache), salt) for name, cache, salt in (first, second)]
    assert (salts[0] == salts[1]) == (caches[0] == caches[1])
    # No client that a front end without keys serves can send it: see vLLM's validate_cache_salt.
    assert salts[0].startswith("/")


def test_limits_belong_to_the_tenant(file: Path) -> None:
    make(file, "a", "--models", "x, y", "--concurrency", "3")
    make(file, "a", "--requests-per-minute", "60")
    assert run(file, "make", "a", "--no-key", "--priority", "2").stdout == ""
    tenant_keys = read_keys(file)
    expected = Tenant(name="a", models=("x", "y"), concurrency=3, requests_per_minute=60.0, priority=2)
    assert tenant_keys.tenants == (expected,)
    assert len([key for key in tenant_keys.keys if key.tenant]) == 2
    assert "x, y" in run(file, "list").stdout


def test_weight_belongs_to_the_tenant(file: Path) -> None:
    make(file, "a")
    make(file, "b", "--weight", "2.5")
    assert [tenant.weight for tenant in read_keys(file).tenants] == [1.0, 2.5]
    assert "2.5" in run(file, "list").stdout
    assert run(file, "make", "a", "--weight", "0").exit_code == 2
    file.write_text(file.read_text().replace("2.5", "0"))
    with pytest.raises(KeyFileUnusable, match="weight"):
        read_keys(file)


def test_burst_belongs_to_the_tenant(file: Path) -> None:
    make(file, "a", "--requests-per-minute", "90")
    make(file, "b", "--requests-per-minute", "90", "--burst-seconds", "7.5")
    assert [tenant.burst_seconds for tenant in read_keys(file).tenants] == [60.0, 7.5]
    assert "7.5" in run(file, "list").stdout
    for wrong in ("0.5", "61"):
        assert run(file, "make", "a", "--burst-seconds", wrong).exit_code == 2


def test_file_contains_only_values_that_were_set(file: Path) -> None:
    make(file, "a", "--concurrency", "3")
    assert json.loads(file.read_text())["tenants"] == [{"name": "a", "concurrency": 3}]
    (listed,) = json.loads(run(file, "list", "-o", "json").stdout)["tenants"]
    assert listed["burst_seconds"] == 60.0 and listed["weight"] == 1.0


def test_revoked_key_has_no_owner(file: Path) -> None:
    first, second = make(file, "a"), make(file, "a")
    assert run(file, "revoke", first.split("-")[2]).exit_code == 0
    index = KeyIndex(read_keys(file))
    assert index.holder(first) is None and index.holder(second) is not None
    assert run(file, "revoke", "none").exit_code == 2


def test_a_tenant_without_keys_keeps_its_limits(file: Path) -> None:
    key = make(file, "a", "--concurrency", "3", "--models", "x")
    make(file, "b")
    run(file, "revoke", key.split("-")[2])
    (line,) = [line.split() for line in run(file, "list").stdout.splitlines() if " a " in line]
    assert line[:4] == ["-", "a", "-", "x"]
    key = make(file, "a")
    owner = KeyIndex(read_keys(file)).holder(key)
    assert owner is not None and owner.tenant == Tenant(name="a", concurrency=3, models=("x",))


def test_a_removed_tenant_leaves_nothing(file: Path) -> None:
    keys = [make(file, "a", "--concurrency", "3"), make(file, "a")]
    other = make(file, "b")
    assert run(file, "remove", "a").exit_code == 0
    index = KeyIndex(read_keys(file))
    assert not any(map(index.holder, keys)) and index.holder(other) is not None
    assert read_keys(file).tenants == (Tenant(name="b"),) and read_keys(file).edge_key
    result = run(file, "remove", "a")
    assert result.exit_code == 2 and "there is no tenant 'a'" in result.stderr


def test_running_front_end_follows_the_key_file(file: Path) -> None:
    ticks = iter(range(0, 1000, 2))
    first = make(file, "a")
    keys = KeyFile(file, lambda: float(next(ticks)))
    second = make(file, "b")
    assert keys.index().holder(second) is not None
    run(file, "revoke", first.split("-")[2])
    assert keys.index().holder(first) is None
    # An invalid file leaves the previous keys in force.
    file.write_text("rubbish")
    assert keys.index().holder(second) is not None


KEY: dict[str, Any] = {"key_id": "k", "sha256": "0a" * 32, "tenant": "a", "created": ""}


@pytest.mark.parametrize(
    ("tenants", "keys", "field"),
    [
        ([{"name": "a", "requests_per_minute": -5}], [], "tenants[0].requests_per_minute"),
        ([{"name": "a", "tokens_per_minute": -0.5}], [], "tenants[0].tokens_per_minute"),
        ([{"name": "a", "concurrency": -1}], [], "tenants[0].concurrency"),
        ([{"name": "a", "longest_prompt": -1}], [], "tenants[0].longest_prompt"),
        ([{"name": "a"}, {"name": "b"}, {"name": "a"}], [], "tenants[2].name"),
        ([{"name": "a"}], [KEY, KEY | {"created": "later"}], "keys[1].key_id"),
        ([{"name": "b"}], [KEY], "keys[0].tenant"),
        ([{"name": "a"}], [KEY, KEY | {"key_id": "l", "tenant": ""}], "keys[1].tenant"),
        ([{"name": "a"}], [KEY | {"key_id": "edges"}], "keys[0].tenant"),
        *(
            ([{"name": "a"}], [KEY | {"sha256": digest}], "keys[0].sha256")
            for digest in ("zz", "", "0A" * 32, "0a" * 33, "0a" * 32 + "\n")
        ),
        (None, [], "`tenants`"),
        ([], None, "`keys`"),
        (None, None, "`tenants`"),
    ],
)
def test_impossible_values_in_the_key_file_are_named(
    file: Path, tenants: list[Any] | None, keys: list[Any] | None, field: str
) -> None:
    first = make(file, "first")
    ticks = iter(range(0, 1000, 2))
    followed = KeyFile(file, lambda: float(next(ticks)))
    content = {"tenants": tenants, "keys": keys}
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    with pytest.raises(KeyFileUnusable, match=re.escape(field)):
        read_keys(file)
    assert field in followed.problem() and followed.index().holder(first) is not None


def test_what_the_commands_write_can_be_read(file: Path) -> None:
    zeros = [f"--{name}=0" for name in ("requests-per-minute", "tokens-per-minute", "concurrency")]
    key_id = make(file, "a", *zeros, "--longest-prompt=0", "--priority=-3").split("-")[2]
    for command in (["revoke", key_id], ["revoke", "edges"], ["make", "a"], ["make", "b"], ["remove", "a"]):
        assert run(file, *command).exit_code == 0
        read_keys(file)
    run(file, "remove", "b")
    left = read_keys(file)
    assert not left.tenants and [key.key_id for key in left.keys] == ["edges"]
    # An earlier version wrote every limit, and no key of edges.
    limits = {"requests_per_minute": 0.0, "tokens_per_minute": 0.0, "concurrency": 0, "longest_prompt": 0}
    file.write_text(json.dumps({"tenants": [{"name": "a", "models": [], **limits}], "keys": [KEY]}))
    assert read_keys(file).tenants == (Tenant(name="a"),)
    run(file, "remove", "a")
    assert read_keys(file) == TenantKeys()


@pytest.mark.parametrize("models", [",", ",,", " ", "x,", ",x", "x,,y"])
def test_an_empty_name_does_not_mean_all_models(file: Path, models: str) -> None:
    result = run(file, "make", "a", "--models", models)
    assert result.exit_code == 2 and f"--models: {models!r} has an empty name" in result.stderr
    assert not file.exists()
    make(file, "a", "--models", "x")
    make(file, "a", "--models", "")
    assert read_keys(file).tenants == (Tenant(name="a"),)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"tenants": [{"name": "a", "rate": 3}]}', b'{"keys": [{"key_id": "\xff"}]}']
)
def test_damaged_key_file_is_named(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(KeyFileUnusable, match=r"keys\.json: no usable file of API keys \("):
        KeyFile(file)
    for command in (["list"], ["make", "a"], ["revoke", "a"], ["remove", "a"]):
        result = run(file, *command)
        assert result.exit_code == 1
        assert f"restore a copy of it, or remove it: tailrace keys make TENANT --file {file}" in result.stderr


def test_a_key_file_that_is_not_there(file: Path) -> None:
    result = run(file, "list")
    assert result.exit_code == 1
    assert (
        f"No such file or directory; restore a copy, or tailrace keys make TENANT --file {file} makes one"
        in result.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--front", "none"], "an API server of your own"),
        (["--api-key", "x"], "vLLM's own key"),
    ],
)
def test_incompatible_options_are_refused(file: Path, arguments: list[str], message: str) -> None:
    make(file, "a")
    result = CliRunner().invoke(main, ["serve", "frontend", "--api-keys", str(file), *arguments])
    assert result.exit_code == 2 and message in result.stderr


def test_responses_of_all_tenants_are_not_stored_together(file: Path) -> None:
    make(file, "a")
    command = ["serve", "frontend", "--api-keys", str(file)]
    result = CliRunner().invoke(main, command, env={"VLLM_ENABLE_RESPONSES_API_STORE": "1"})
    assert result.exit_code == 2 and "VLLM_ENABLE_RESPONSES_API_STORE" in result.stderr


def test_fair_backlog_requires_api_keys() -> None:
    result = CliRunner().invoke(main, ["serve", "frontend", "--fair-backlog", "1000"])
    assert result.exit_code == 2 and "--fair-backlog: requires --api-keys" in result.stderr


def test_the_key_of_edges_is_made_once_and_no_users(file: Path) -> None:
    make(file, "a")
    edge_key = read_keys(file).edge_key
    assert edge_key and KeyIndex(read_keys(file)).holder(edge_key) is None
    make(file, "b")
    assert read_keys(file).edge_key == edge_key
    assert edge_key.rpartition("-")[2] not in run(file, "list", "-o", "json").stdout
    assert len(json.loads(run(file, "list", "-o", "json").stdout)["keys"]) == 2


def test_the_key_of_edges_is_replaced_at_once(file: Path) -> None:
    """Without one, a front end with vllm-rs that restarts would exit."""
    make(file, "a")
    before = read_keys(file)
    result = run(file, "revoke", "edges")
    assert result.exit_code == 0 and "restart front ends with --front rust" in result.stderr
    assert read_keys(file).edge_key not in ("", before.edge_key)
    assert read_keys(file).tenants == before.tenants
    assert [key for key in read_keys(file).keys if key.tenant] == [key for key in before.keys if key.tenant]


def test_vllm_rs_needs_a_key_of_edges_and_no_further_routes(file: Path) -> None:
    """A file of an earlier version has none."""
    tenant_keys, _ = TenantKeys(tenants=(Tenant(name="a"),)).with_key("a", "now")
    file.write_bytes(msgspec.json.encode(tenant_keys))
    command = ["serve", "frontend", "--front", "rust", "--api-keys", str(file)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2 and "any `tailrace keys make` adds it" in result.stderr
    run(file, "make", "a", "--no-key")
    result = CliRunner().invoke(main, command, env={"VLLM_SERVER_DEV_MODE": "1"})
    assert result.exit_code == 2 and "VLLM_SERVER_DEV_MODE" in result.stderr


def test_http_port_beyond_loopback_requires_keys(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    open_arguments = ["serve", "frontend", "--http", "0.0.0.0:8000"]
    result = CliRunner().invoke(main, open_arguments)
    assert result.exit_code == 2 and "0.0.0.0:8000 can be reached from other machines" in result.stderr
    # With --api-keys it fails later, as the file does not exist.
    missing = CliRunner().invoke(main, [*open_arguments, "--api-keys", str(file)])
    assert missing.exit_code == 1 and "keys.json: No such file" in missing.stderr
