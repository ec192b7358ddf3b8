"""A service that is reachable from other machines does not start without authentication."""

from __future__ import annotations

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


def test_certificate_with_the_right_role_allows_any_address(authority: Authority) -> None:
    arguments = ["serve", "scheduler", "--listen", "0.0.0.0:0", "--policy", "magic", "--tls"]
    own = authority.issue(Identity(Role.SCHEDULER, "s")).folder
    assert "unknown policy 'magic'" in CliRunner().invoke(main, [*arguments, str(own)]).stderr
    other = authority.issue(Identity(Role.WORKER, "w")).folder
    refused = CliRunner().invoke(main, [*arguments, str(other)])
    assert refused.exit_code == 1
    assert "its role is worker; scheduler is required here" in refused.stderr
