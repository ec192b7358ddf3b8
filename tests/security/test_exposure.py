"""A service that is reachable from other machines does not start without authentication."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tailrace.cli.main import main
from tailrace.security.authority import Authority
from tailrace.security.options import is_loopback
from tailrace.security.roles import Identity, Role


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("*:1", False),
        (":1", False),
        ("10.0.0.1:1", False),
        ("node-7:1", False),
    ],
)
def test_is_loopback(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


@pytest.mark.parametrize("kind", ["monitor", "migration", "scheduler", "worker", "frontend"])
@pytest.mark.parametrize("option", ["--listen", "--metrics"])
def test_address_beyond_loopback_requires_a_certificate(kind: str, option: str) -> None:
    result = CliRunner().invoke(main, ["serve", kind, option, "0.0.0.0:7199"])
    assert result.exit_code == 2
    assert "0.0.0.0:7199 can be reached from other machines" in result.stderr
    assert "--insecure" in result.stderr


@pytest.mark.parametrize("options", [["--insecure"], []])
def test_insecure_option_allows_other_addresses(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if not options:
        monkeypatch.setenv("TAILRACE_INSECURE", "1")
    # Past the check of the address, it fails at the unknown policy.
    arguments = ["serve", "scheduler", "--listen", "0.0.0.0:0", *options, "--policy", "magic"]
    assert "unknown policy 'magic'" in CliRunner().invoke(main, arguments).stderr


def _served(authority: Authority, *arguments: str) -> str:
    """Return the refusal of a front end with a certificate; without another one, of --fair-backlog."""
    own = str(authority.issue(Identity(Role.FRONTEND, "f")).folder)
    command = ["serve", "frontend", "--tls", own, "--listen", "0.0.0.0:0", "--fair-backlog", "1"]
    result = CliRunner().invoke(main, [*command, *arguments])
    assert result.exit_code == 2
    return result.stderr


_HTTPS = ["--ssl-certfile", "c", "--ssl-keyfile", "k"]


@pytest.mark.parametrize("front", ["python", "rust"])
@pytest.mark.parametrize(
    "key",
    [
        [],
        ["--api-key", ""],
        ["--api-key="],
        ["--api-key", "--seed=1"],
        # Certificates of clients that nobody asks for, or that nobody could verify.
        [*_HTTPS, "--ssl-ca-certs", "a", "--ssl-cert-reqs", "1"],
        [*_HTTPS, "--ssl-cert-reqs", "2"],
    ],
)
def test_certificate_does_not_open_the_users_port(
    authority: Authority, front: str, key: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    refused = _served(authority, "--http", "0.0.0.0:8000", "--front", front, *key)
    assert "users' address 0.0.0.0:8000 can be reached from other machines" in refused
    assert all(way in refused for way in ("--api-keys", "VLLM_API_KEY", "127.0.0.1", "--insecure"))


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["--http", "127.0.0.1:8000"], ""),
        (["--http", "0.0.0.0:8000", "--insecure"], ""),
        (["--http", "0.0.0.0:8000"], "secret"),
        (["--http", "0.0.0.0:8000", "--api-key"], "secret"),
        (["--http", "0.0.0.0:8000", "--api-key", "secret"], ""),
        (["--http", "0.0.0.0:8000", "--api_key=secret"], ""),
        (["--http", "0.0.0.0:8000", *_HTTPS, "--ssl-ca-certs", "a", "--ssl-cert-reqs", "2"], ""),
    ],
)
def test_users_port_is_judged_by_its_own_protection(
    authority: Authority, arguments: list[str], environment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", environment)
    assert "--fair-backlog" in _served(authority, *arguments)


def test_empty_key_argument_hides_the_one_of_the_environment(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in vLLM, whose API server then requires none."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    refused = _served(authority, "--http", "0.0.0.0:8000", "--api-key", "")
    assert "can be reached from other machines" in refused


def test_documented_front_ends_beyond_loopback_require_keys() -> None:
    root = Path(__file__).resolve().parents[2]
    pages = [root / "README.md", *root.glob("docs/*.md"), *root.glob("deploy/**/*.md")]
    lines = [line for page in pages for line in page.read_text().splitlines() if "serve frontend" in line]
    beyond = [
        line for line in lines if (http := re.search(r"--http[ =](\S+)", line)) and not is_loopback(http[1])
    ]
    assert beyond and all("--api-keys" in line for line in beyond)


def test_empty_variable_names_no_key_file(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a unit's own file switches off the one that all units share."""
    monkeypatch.setenv("TAILRACE_API_KEYS", "")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert "--fair-backlog: requires --api-keys" in _served(authority, "--http", "0.0.0.0:8000")


def test_certificate_with_the_right_role_allows_any_address(authority: Authority) -> None:
    arguments = ["serve", "scheduler", "--listen", "0.0.0.0:0", "--policy", "magic", "--tls"]
    own = authority.issue(Identity(Role.SCHEDULER, "s")).folder
    assert "unknown policy 'magic'" in CliRunner().invoke(main, [*arguments, str(own)]).stderr
    other = authority.issue(Identity(Role.WORKER, "w")).folder
    refused = CliRunner().invoke(main, [*arguments, str(other)])
    assert refused.exit_code == 1
    assert "its role is worker; scheduler is required here" in refused.stderr
