"""Certificates in a folder: unusable ones are named, and running processes keep the previous one."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.serialization import Encoding

from tailrace.cli.main import main
from tailrace.security.authority import Authority, AuthorityProblem
from tailrace.security.credentials import UnusableCredentials, read_credentials
from tailrace.security.folder import CredentialFolder
from tailrace.security.roles import Identity, NoIdentity, Role, identity_of
from tests.security.conftest import EXPIRED_DAYS

WORKER = Identity(Role.WORKER, "worker-0")


AUTHORITY_FILES = {"ca.key", "ca.crt", "etcd-ca.key", "etcd-ca.crt"}


def certs(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["certs", *arguments, "--dir", str(folder)])


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        # The clock advances by a second at each check.
        self.now_s += 1.0
        return self.now_s


def test_certificate_contains_the_identity(authority: Authority) -> None:
    issued = authority.issue(WORKER, hosts=["10.0.0.7", "node-7"])
    credentials = read_credentials(issued.folder)
    assert credentials.identity == WORKER
    assert credentials.not_after_s == issued.not_after.timestamp()
    assert b"PRIVATE" not in repr(credentials).encode()
    assert (issued.folder / "tls.key").stat().st_mode & 0o077 == 0
    assert {*authority.issued()[0].hosts} == {"10.0.0.7", "node-7"}


@pytest.mark.parametrize("uris", [[], ["https://x"], ["tailrace://worker/a", "tailrace://worker/b"]])
def test_certificate_must_have_exactly_one_identity(uris: list[str]) -> None:
    with pytest.raises(NoIdentity):
        identity_of(uris)


@pytest.mark.parametrize(
    "uri", ["wurker/a", "worker/", "worker/a/b", "worker/.", "worker/..", "worker/...", "worker/..\n"]
)
def test_identity_must_have_a_known_role_and_a_plain_name(uri: str) -> None:
    with pytest.raises(NoIdentity):
        identity_of([f"tailrace://{uri}"])


def test_a_name_leads_nowhere_else(authority: Authority) -> None:
    for name in (".", ".."):
        result = certs(authority.folder, "issue", "viewer", name)
        assert result.exit_code == 2 and "not dots alone" in result.stderr
    assert {path.name for path in authority.folder.iterdir()} == AUTHORITY_FILES
    assert identity_of(["tailrace://worker/.a.b."]).name == ".a.b."


def test_expired_certificate_is_named(authority: Authority) -> None:
    folder = authority.issue(WORKER, days=EXPIRED_DAYS).folder
    with pytest.raises(UnusableCredentials, match=r"worker-0/tls.crt: the certificate has expired"):
        read_credentials(folder)


def test_foreign_certificate_is_named(authority: Authority, foreign: Authority) -> None:
    folder = foreign.issue(WORKER).folder
    shutil.copy(authority.folder / "ca.crt", folder)
    with pytest.raises(UnusableCredentials, match=r"not signed by an authority trusted here"):
        read_credentials(folder)


def test_certificate_with_the_wrong_role_is_named(authority: Authority) -> None:
    folder = authority.issue(WORKER).folder
    with pytest.raises(UnusableCredentials, match=r"its role is worker; monitor is required here"):
        CredentialFolder(folder, frozenset({Role.MONITOR}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tls.key", b"", "not PEM"),
        ("tls.crt", b"rubbish", "not PEM"),
        ("ca.crt", b"rubbish", "no start line|not PEM"),
        ("ca.crt", b"\xff", "ascii"),
    ],
)
def test_unreadable_file_is_named(authority: Authority, name: str, content: bytes, message: str) -> None:
    folder = authority.issue(WORKER).folder
    (folder / name).write_bytes(content)
    with pytest.raises(UnusableCredentials, match=message):
        read_credentials(folder)


def test_missing_file_is_named(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(UnusableCredentials, match=r"ca.crt: No such file"):
        read_credentials(tmp_path / "nothing")


def test_new_certificate_is_read_when_its_files_change(authority: Authority) -> None:
    credentials = CredentialFolder(authority.issue(WORKER).folder, frozenset({Role.WORKER}), Clock())
    version, before = credentials.versioned()
    assert credentials.versioned() == (version, before)
    authority.rotate()
    after, now = credentials.versioned()
    assert after != version and now.certificate != before.certificate


def test_partial_replacement_waits_for_the_other_file(
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


def test_invalid_replacement_is_logged_once_and_the_old_one_stays_in_use(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    folder = authority.issue(WORKER).folder
    credentials = CredentialFolder(folder, frozenset({Role.WORKER}), Clock())
    before = credentials.current()
    authority.issue(WORKER, days=EXPIRED_DAYS)
    for _ in range(5):
        assert credentials.current() is before
    (message,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert "has expired; the previous certificate stays in use" in message


def test_authority_is_replaced_in_three_steps(authority: Authority) -> None:
    folders = [authority.issue(Identity(Role.WORKER, name)).folder for name in ("a", "b")]
    authority.supersede()
    # Both authorities are trusted, and certificates of the older one are in use.
    older = [read_credentials(folder) for folder in folders]
    with pytest.raises(AuthorityProblem, match="older authority"):
        authority.retire()
    authority.rotate()
    Authority.load(authority.folder).retire()
    newer = [read_credentials(folder) for folder in folders]
    assert [each.identity for each in newer] == [each.identity for each in older]
    assert newer[0].authorities != older[0].authorities
    assert newer[0].authorities.count(b"BEGIN CERTIFICATE") == 1


class Interrupted(Exception):
    """The command was ended."""


@contextmanager
def interrupted_after(files: int) -> Iterator[list[bool]]:
    """End what runs in the block before it replaces one file more; yield whether it was ended."""
    left, ended = [files], [False]

    whole = Path.replace

    def replace(path: Path, target: Path) -> Path:
        if not left[0]:
            raise Interrupted
        left[0] -= 1
        return whole(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        try:
            yield ended
        except Interrupted:
            ended[0] = True


def test_an_interrupted_creation_is_repeated(tmp_path: Path) -> None:
    for files in itertools.count():
        folder = tmp_path / str(files)
        with interrupted_after(files) as ended:
            Authority.create(folder)
        if not ended[0]:
            return
        with pytest.raises(AuthorityProblem, match="no authority"):
            Authority.load(folder)
        read_credentials(Authority.create(folder).issue(WORKER).folder)
        assert {path.name for path in folder.iterdir() if path.name[0] != "."} == {*AUTHORITY_FILES, "issued"}


@pytest.mark.parametrize("has_etcd", [True, False])
def test_an_interrupted_replacement_of_the_authority_goes_on(tmp_path: Path, has_etcd: bool) -> None:
    """After every file, what signs is trusted by all that was issued; the same command then finishes."""
    first = tmp_path / "first"
    authority = Authority.create(first)
    if not has_etcd:
        # As versions made it whose etcd had no authority of its own.
        for name in ("etcd-ca.key", "etcd-ca.crt"):
            (first / name).unlink()
        authority = Authority.load(first)
    for role in (Role.WORKER, Role.ADMIN, Role.ETCD):
        authority.issue(Identity(role, "a"))
    old = (first / "ca.crt").read_bytes()

    def steps(folder: Path) -> Iterator[Callable[[], object]]:
        yield lambda: Authority.load(folder).supersede()
        yield lambda: Authority.load(folder).rotate()
        yield lambda: Authority.load(folder).retire()

    for files in itertools.count():
        folder = Path(shutil.copytree(first, tmp_path / f"{files}"))
        whole = True
        for step in steps(folder):
            with interrupted_after(files) as ended:
                step()
            if ended[0]:
                whole = False
                now = Authority.load(folder)
                for issued in now.issued():
                    for credentials, signer in now._credentials_of(issued):
                        trusted = credentials / "ca.crt"
                        signs = signer.trusted[0].public_bytes(Encoding.PEM)
                        assert not trusted.exists() or signs in trusted.read_bytes()
                step()
        made = [read_credentials(each.folder) for each in Authority.load(folder).issued()]
        assert len(made) == 3 and all(each.authorities.count(b"BEGIN") == 1 for each in made)
        assert all(each.authorities != old for each in made)
        etcd = {each.etcd.authorities for each in made if each.etcd is not None}
        assert etcd == {(folder / "etcd-ca.crt").read_bytes()} and old not in etcd
        shutil.rmtree(folder)
        if whole:
            return


def test_retiring_says_what_trusts_the_old_authority_until_it_is_restarted(authority: Authority) -> None:
    authority.supersede()
    result = CliRunner().invoke(main, ["certs", "retire-authority", "--dir", str(authority.folder)])
    assert result.exit_code == 0
    assert all(each in result.stderr for each in ("etcd's members", "front ends with HTTPS", "restart"))


@pytest.mark.skipif(os.geteuid() != 0, reason="changes owners")
def test_reissued_files_keep_their_owners(authority: Authority) -> None:
    """A service that reads the folder as its own user still can when root has reissued its certificate."""
    folder = authority.issue(Identity(Role.WORKER, "w")).folder
    for path in (folder, *folder.iterdir()):
        os.chown(path, 65534, 65534)
    authority.rotate()
    assert {(path.stat().st_uid, path.stat().st_gid) for path in folder.iterdir()} == {(65534, 65534)}


def test_second_authority_does_not_overwrite_the_first(authority: Authority) -> None:
    with pytest.raises(AuthorityProblem, match="already has an authority"):
        Authority.create(authority.folder)
    with pytest.raises(AuthorityProblem, match="no authority"):
        Authority.load(authority.folder / "issued")


@pytest.mark.parametrize("left", sorted(AUTHORITY_FILES))
def test_no_file_of_an_authority_is_overwritten(authority: Authority, left: str) -> None:
    """Its keys may be kept on another machine."""
    for name in AUTHORITY_FILES - {left}:
        (authority.folder / name).unlink()
    before = contents(authority.folder)
    result = certs(authority.folder, "init")
    assert result.exit_code == 1 and f"{authority.folder / left} exists" in result.stderr
    assert contents(authority.folder) == before


@pytest.mark.parametrize(
    ("missing", "needed"),
    [
        ("ca.key", [["issue", "viewer", "v"], ["issue", "worker", "w"]]),
        ("etcd-ca.key", [["issue", "etcd", "e"], ["issue", "worker", "w"], ["issue", "etcd-root", "r"]]),
    ],
)
def test_a_key_that_is_kept_elsewhere_is_named(
    authority: Authority, missing: str, needed: list[list[str]]
) -> None:
    """The cluster's key never signs in place of etcd's."""
    for role in (Role.WORKER, Role.ADMIN, Role.ETCD):
        authority.issue(Identity(role, "a"))
    (authority.folder / missing).unlink()
    before = contents(authority.folder)
    for command in (*needed, ["rotate"], ["new-authority"], ["retire-authority"]):
        result = certs(authority.folder, *command)
        assert result.exit_code == 1, command
        assert f"{authority.folder / missing} is missing" in result.stderr
        assert contents(authority.folder) == before
    listed = certs(authority.folder, "list")
    assert listed.exit_code == 0 and listed.stderr == "" and len(listed.stdout.splitlines()) == 5
    other = "viewer" if missing == "etcd-ca.key" else "etcd"
    assert certs(authority.folder, "issue", other, "x").exit_code == 0


@pytest.mark.parametrize("name", sorted(AUTHORITY_FILES))
def test_a_damaged_file_of_the_authority_is_named(authority: Authority, name: str) -> None:
    for content in (b"junk\n", b"", b"\xff"):
        (authority.folder / name).write_bytes(content)
        result = certs(authority.folder, "issue", "worker", "w")
        assert result.exit_code == 1
        assert f"{authority.folder / name}: no usable" in result.stderr and "restore a copy" in result.stderr


def test_a_key_of_another_authority_is_named(authority: Authority, foreign: Authority) -> None:
    shutil.copy(foreign.folder / "ca.key", authority.folder)
    with pytest.raises(AuthorityProblem, match=r"certs/ca\.key: not the key of any certificate in ca\.crt"):
        Authority.load(authority.folder)


def test_expiry_of_a_certificate_is_logged_daily_before_and_after_it(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    issued = authority.issue(WORKER, days=90)
    end_s, day_s = issued.not_after.timestamp(), 86_400.0
    now_s = [end_s - 30 * day_s]
    with caplog.at_level(logging.WARNING):
        # The same clock serves for file checks and for expiry.
        folder = CredentialFolder(issued.folder, frozenset({Role.WORKER}), lambda: now_s[0], lambda: now_s[0])
        for left_days, logged in [
            (8.0, ""),
            (6.5, "tls.crt expires in 6.5 days"),
            (6.0, ""),
            (5.4, "tls.crt expires in 5.4 days"),
            (0.5, "tls.crt expires in 0.5 days"),
            (0.3, ""),
            (-0.01, "tls.crt expired at "),
            (-0.5, ""),
            (-1.1, "tls.crt expired at "),
        ]:
            caplog.clear()
            now_s[0] = end_s - left_days * day_s
            folder.current()
            messages = [record.getMessage() for record in caplog.records]
            assert len(messages) == bool(logged), (left_days, messages)
            assert all(logged in message for message in messages)
        # A new certificate ends the warnings.
        authority.issue(WORKER, days=90)
        caplog.clear()
        now_s[0] = end_s - 2 * day_s
        folder.current()
        now_s[0] += 1.5 * day_s
        folder.current()
        assert not caplog.records


def test_certificate_for_one_day_causes_no_warning(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    CredentialFolder(authority.issue(WORKER, days=1).folder, frozenset({Role.WORKER}))
    assert not caplog.records


def test_list_shows_the_remaining_days(authority: Authority) -> None:
    authority.issue(WORKER, days=90)
    authority.issue(Identity(Role.WORKER, "worker-1"), days=EXPIRED_DAYS)
    table = CliRunner().invoke(main, ["certs", "list", "--dir", str(authority.folder)]).stdout.splitlines()
    first, second, third = (
        next(row for row in table if name in row) for name in ("r-0 ", "r-1 ", "authority")
    )
    assert " 90.0 " in first and " expired " in second and " 36" in third
    listed = CliRunner().invoke(main, ["certs", "list", "--dir", str(authority.folder), "-o", "json"]).stdout
    days = {each["name"]: each["days_left"] for each in json.loads(listed)["certificates"]}
    assert days["worker-0"] == pytest.approx(90, abs=0.1) and days["worker-1"] <= 0
    assert json.loads(listed)["authority"]["days_left"] > 3_600
