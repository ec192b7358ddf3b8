"""A file of users' keys with a key that a test chose."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import msgspec

from tailrace.tenancy.keys import ApiKey, Tenant, TenantKeys

_TENANT: Final = "users"


def write_key_file(file: Path, key: str) -> Path:
    """Write a file with one tenant, which may use everything, and this key (`sk-tailrace-ID-...`)."""
    digest = hashlib.sha256(key.encode()).hexdigest()
    entry = ApiKey(key_id=key.split("-")[2], sha256=digest, tenant=_TENANT, created="")
    file.write_bytes(msgspec.json.encode(TenantKeys(tenants=(Tenant(name=_TENANT),), keys=(entry,))))
    return file
