"""A folder's certificate: what cannot be used is named, and what runs goes on with what it had."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from tailrace.security.authority import Authority, AuthorityProblem
from tailrace.security.credentials import UnusableCredentials, read_credentials
from tailrace.security.folder import CredentialFolder
from tailrace.security.roles import Identity, NoIdentity, Role, identity_of
from tests.security.conftest import EXPIRED_DAYS

WORKER = Identity(Role.WORKER, "worker-0")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        # Each look is a second after the last.
        self.now_s += 1.0
        return self.now_s


def test_a_certificate_says_who_has_it(authority: Authority) -> None:
    issued = authority.issue(WORKER, hosts=["10.0.0.7", "node-7"])
    read = read_credentials(issued.folder)
    assert read.identity == WORKER
    assert read.not_after_s == issued.not_after.timestamp()
    assert b"PRIVATE" not in repr(read).encode()
    assert (issued.folder / "tls.key").stat().st_mode & 0o077 == 0
    assert {*authority.issued()[0].hosts} == {"10.0.0.7", "node-7"}


@pytest.mark.parametrize("uris", [[], ["https://x"], ["tailrace://worker/a", "tailrace://worker/b"]])
def test_an_identity_is_one(uris: list[str]) -> None:
    with pytest.raises(NoIdentity):
        identity_of(uris)


@pytest.mark.parametrize("uri", ["tailrace://wurker/a", "tailrace://worker/", "tailrace://worker/a/b"])
def test_an_identity_is_of_a_known_role_and_a_plain_name(uri: str) -> None:
    with pytest.raises(NoIdentity):
        identity_of([uri])


def test_an_expired_certificate_is_named(authority: Authority) -> None:
    folder = authority.issue(WORKER, days=EXPIRED_DAYS).folder
    with pytest.raises(UnusableCredentials, match=r"worker-0/tls.crt: the certificate has expired"):
        read_credentials(folder)


def test_a_foreign_certificate_is_named(authority: Authority, foreign: Authority) -> None:
    folder = foreign.issue(WORKER).folder
    shutil.copy(authority.folder / "ca.crt", folder)
    with pytest.raises(UnusableCredentials, match=r"not signed by an authority trusted here"):
        read_credentials(folder)


def test_a_certificate_of_the_wrong_role_is_named(authority: Authority) -> None:
    folder = authority.issue(WORKER).folder
    with pytest.raises(UnusableCredentials, match=r"its role is worker; monitor is required here"):
        CredentialFolder(folder, frozenset({Role.MONITOR}))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tls.key", b"", "not PEM"),
        ("tls.crt", b"rubbish", "not PEM"),
        ("ca.crt", b"rubbish", "no start line|not PEM"),
        ("ca.crt", b"\xff", "ascii"),
    ],
)
def test_rubbish_is_named(authority: Authority, name: str, content: bytes, said: str) -> None:
    folder = authority.issue(WORKER).folder
    (folder / name).write_bytes(content)
    with pytest.raises(UnusableCredentials, match=said):
        read_credentials(folder)


def test_a_missing_file_is_named(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(UnusableCredentials, match=r"ca.crt: No such file"):
        read_credentials(tmp_path / "nothing")


def test_a_new_certificate_is_read_when_its_files_change(authority: Authority) -> None:
    credentials = CredentialFolder(authority.issue(WORKER).folder, frozenset({Role.WORKER}), Clock())
    version, before = credentials.versioned()
    assert credentials.versioned() == (version, before)
    authority.rotate()
    after, now = credentials.versioned()
    assert after != version and now.certificate != before.certificate


def test_half_of_a_replacement_waits_for_the_other_half(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    folder = authority.issue(WORKER).folder
    credentials = CredentialFolder(folder, frozenset({Role.WORKER}), Clock())
    before = credentials.current()
    certificate = (folder / "tls.crt").read_bytes()
    authority.rotate()
    renewed = (folder / "tls.crt").read_bytes()
    (folder / "tls.crt").write_bytes(certificate)
    assert credentials.current() is before
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    (folder / "tls.crt").write_bytes(renewed)
    assert credentials.current().certificate == renewed


def test_a_mistake_is_said_once_and_what_runs_goes_on(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    folder = authority.issue(WORKER).folder
    credentials = CredentialFolder(folder, frozenset({Role.WORKER}), Clock())
    before = credentials.current()
    authority.issue(WORKER, days=EXPIRED_DAYS)
    for _ in range(5):
        assert credentials.current() is before
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert "has expired; the previous certificate stays in use" in said


def test_an_authority_is_replaced_in_three_steps(authority: Authority) -> None:
    folders = [authority.issue(Identity(Role.WORKER, name)).folder for name in ("a", "b")]
    authority.supersede()
    # Both are trusted, and what the older one signed is in use.
    older = [read_credentials(folder) for folder in folders]
    with pytest.raises(AuthorityProblem, match="older authority"):
        authority.retire()
    authority.rotate()
    Authority.load(authority.folder).retire()
    newer = [read_credentials(folder) for folder in folders]
    assert [each.identity for each in newer] == [each.identity for each in older]
    assert newer[0].authorities != older[0].authorities
    assert newer[0].authorities.count(b"BEGIN CERTIFICATE") == 1


def test_a_second_authority_does_not_overwrite_the_first(authority: Authority) -> None:
    with pytest.raises(AuthorityProblem, match="already has an authority"):
        Authority.create(authority.folder)
    with pytest.raises(AuthorityProblem, match="no authority"):
        Authority.load(authority.folder / "issued")
