"""`tailrace serve console`: who may open it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from console_svc.main import command
from tailrace.security.authority import Authority
from tailrace.security.roles import Identity, Role

NOWHERE = ("--admin", "127.0.0.1:1")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Note what would be run instead of running it."""
    mains: list[object] = []
    monkeypatch.setattr("console_svc.main.run_service", mains.append)
    return mains


def _run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, [*NOWHERE, *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize("address", ["0.0.0.0:8081", "10.0.0.5:8081", "[::]:8081", "console.example:8081"])
def test_beyond_loopback_it_needs_a_token(started: list[object], tmp_path: Path, address: str) -> None:
    code, output = _run("--http", address)
    assert code == 2 and "--token-file" in output
    assert _run("--http", address, "--token-file", str(tmp_path / "token"))[0] == 0
    assert _run("--http", address, "--insecure")[0] == 0
    assert len(started) == 2


def test_with_a_certificate_it_needs_a_token(started: list[object], tmp_path: Path) -> None:
    folder = str(Authority.create(tmp_path).issue(Identity(Role.VIEWER, "ann")).folder)
    code, output = _run("--tls", folder)
    assert code == 2 and "every user of this machine" in output
    assert _run("--tls", folder, "--token-file", str(tmp_path / "token"))[0] == 0
    assert len(started) == 1


def test_certificate_and_key_for_browsers_go_together(started: list[object], tmp_path: Path) -> None:
    issued = Authority.create(tmp_path).issue(Identity(Role.ETCD, "console")).folder
    files = ("--ssl-certfile", str(issued / "tls.crt")), ("--ssl-keyfile", str(issued / "tls.key"))
    for each in files:
        code, output = _run(*each)
        assert code == 2 and "--ssl-certfile and --ssl-keyfile go together" in output
    assert _run(*files[0], *files[1])[0] == 0
    code, output = _run(*files[0], "--ssl-keyfile", str(issued / "tls.crt"))
    assert code == 1 and "--ssl-certfile" in output
    # They are no token.
    code, output = _run("--http", "0.0.0.0:8081", *files[0], *files[1])
    assert code == 2 and "--token-file" in output
    assert len(started) == 1


def test_a_token_is_made_once_and_nobody_else_reads_it(started: list[object], tmp_path: Path) -> None:
    file = tmp_path / "token"
    assert _run("--token-file", str(file))[0] == 0
    token = file.read_text()
    assert len(token) > 32 and file.stat().st_mode & 0o777 == 0o600
    assert _run("--token-file", str(file))[0] == 0
    assert file.read_text() == token


@pytest.mark.parametrize("content", ["", "short", "ÄÖÜ" * 10, "x" * 5_000])
def test_unusable_tokens(started: list[object], tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    code, output = _run("--token-file", str(file))
    assert code == 1 and f"--token-file: {file}: " in output
    assert not started


@pytest.mark.parametrize("address", ["8081", "host", "::1:8081", "127.0.0.1:99999"])
def test_malformed_addresses(started: list[object], address: str) -> None:
    code, output = _run("--http", address)
    assert code == 2 and "--http" in output
