"""A service that others can reach, and that asks nobody who they are, does not start."""

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
def test_loopback_is_what_nobody_else_reaches(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


@pytest.mark.parametrize("kind", ["monitor", "migration", "scheduler", "worker", "frontend"])
@pytest.mark.parametrize("option", ["--listen", "--metrics"])
def test_beyond_loopback_it_wants_a_certificate(kind: str, option: str) -> None:
    done = CliRunner().invoke(main, ["serve", kind, option, "0.0.0.0:7199"])
    assert done.exit_code == 2
    assert "0.0.0.0:7199 can be reached from other machines" in done.stderr
    assert "--insecure" in done.stderr


@pytest.mark.parametrize("given", [["--insecure"], []])
def test_unless_it_is_told_that_this_is_meant(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if not given:
        monkeypatch.setenv("TAILRACE_INSECURE", "1")
    # It gets as far as the next mistake.
    arguments = ["serve", "scheduler", "--listen", "0.0.0.0:0", *given, "--policy", "magic"]
    assert "unknown policy 'magic'" in CliRunner().invoke(main, arguments).stderr


def test_with_a_certificate_of_its_role_it_listens_anywhere(authority: Authority) -> None:
    arguments = ["serve", "scheduler", "--listen", "0.0.0.0:0", "--policy", "magic", "--tls"]
    own = authority.issue(Identity(Role.SCHEDULER, "s")).folder
    assert "unknown policy 'magic'" in CliRunner().invoke(main, [*arguments, str(own)]).stderr
    other = authority.issue(Identity(Role.WORKER, "w")).folder
    refused = CliRunner().invoke(main, [*arguments, str(other)])
    assert refused.exit_code == 1
    assert "its role is worker; scheduler is required here" in refused.stderr
