"""Authorities and certificates, real ones, made for each run."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tailrace.security.authority import Authority
from tailrace.security.folder import CredentialFolder
from tailrace.security.roles import Identity, Role
from tailrace.security.transport import TlsTransport

EVERY_ROLE = frozenset(Role)
# Shorter than the clocks' allowance: over when it begins.
EXPIRED_DAYS = -0.001


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "certs")


@pytest.fixture
def foreign(tmp_path: Path) -> Authority:
    """Of another cluster."""
    return Authority.create(tmp_path / "foreign")


def transport(authority: Authority, role: Role, name: str = "x") -> TlsTransport:
    """A process of that role."""
    folder = authority.issue(Identity(role, name)).folder
    # Each look at the files is a second after the last.
    return TlsTransport(CredentialFolder(folder, EVERY_ROLE, itertools.count().__next__))
