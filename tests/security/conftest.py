"""Certificate authorities and certificates, generated for each run."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tailrace.security.authority import Authority
from tailrace.security.folder import CredentialFolder
from tailrace.security.roles import Identity, Role
from tailrace.security.transport import TlsTransport

EVERY_ROLE = frozenset(Role)
# Expired from the start, in spite of the allowance for clock skew.
EXPIRED_DAYS = -0.001


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "certs")


@pytest.fixture
def foreign(tmp_path: Path) -> Authority:
    """The authority of another cluster."""
    return Authority.create(tmp_path / "foreign")


def transport(authority: Authority, role: Role, name: str = "x") -> TlsTransport:
    """Return the transport of a process with that role."""
    folder = authority.issue(Identity(role, name)).folder
    # The clock advances by a second at each check of the files.
    return TlsTransport(CredentialFolder(folder, EVERY_ROLE, itertools.count().__next__))
