"""Tenants and their API keys, as they are stored. A key itself is shown once and stored nowhere."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Annotated, Final

import msgspec

_PREFIX: Final = "sk-tailrace"
_SECRET_BYTES: Final = 32
_ID_BYTES: Final = 6

SMALLEST_WEIGHT: Final = 0.01
LARGEST_WEIGHT: Final = 100.0
"""Beyond these a share is a limit or none, which have settings of their own."""


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What whoever has one of its keys may do. 0: no limit."""

    name: str
    # Names of models or adapters as clients say them; empty: all.
    models: tuple[str, ...] = ()
    requests_per_minute: float = 0.0
    # Of prompts and answers together.
    tokens_per_minute: float = 0.0
    # Requests under way.
    concurrency: int = 0
    # As vLLM takes it: smaller is served first, where the engines' order goes by priority.
    priority: int = 0
    # In tokens.
    longest_prompt: int = 0
    # Its share of the fleet among tenants that wait, where a front end has them wait (--fair-backlog).
    weight: Annotated[float, msgspec.Meta(ge=SMALLEST_WEIGHT, le=LARGEST_WEIGHT)] = 1.0


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key, as far as it is stored."""

    # Stands in the key itself, in the clear.
    key_id: str
    # SHA-256 of the whole key, hexadecimal. The key is 256 bits of chance: a slow hash would add nothing.
    sha256: str
    tenant: str
    # UTC, ISO 8601.
    created: str


class KeyBook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of them."""

    tenants: tuple[Tenant, ...] = ()
    keys: tuple[ApiKey, ...] = ()

    def tenant(self, name: str) -> Tenant | None:
        """The tenant of that name."""
        return next((tenant for tenant in self.tenants if tenant.name == name), None)

    def with_tenant(self, tenant: Tenant) -> KeyBook:
        """The same with this tenant, in place of an older one of its name."""
        others = [each for each in self.tenants if each.name != tenant.name]
        return msgspec.structs.replace(self, tenants=(*others, tenant))

    def with_key(self, tenant: str, created: str) -> tuple[KeyBook, str]:
        """The same with one more key of the tenant, and the key."""
        key_id = secrets.token_hex(_ID_BYTES)
        key = f"{_PREFIX}-{key_id}-{secrets.token_urlsafe(_SECRET_BYTES)}"
        entry = ApiKey(key_id=key_id, sha256=_digest(key), tenant=tenant, created=created)
        return msgspec.structs.replace(self, keys=(*self.keys, entry)), key

    def without_key(self, key_id: str) -> KeyBook:
        """The same without a key, and without its tenant if that was its last. Raises KeyError."""
        left = tuple(key for key in self.keys if key.key_id != key_id)
        if len(left) == len(self.keys):
            raise KeyError(key_id)
        named = {key.tenant for key in left}
        tenants = tuple(tenant for tenant in self.tenants if tenant.name in named)
        return KeyBook(tenants=tenants, keys=left)


class KeyIndex:
    """Finds whose a key is."""

    def __init__(self, book: KeyBook) -> None:
        tenants = {tenant.name: tenant for tenant in book.tenants}
        self._found = {
            key.key_id: (key.sha256, tenants[key.tenant]) for key in book.keys if key.tenant in tenants
        }

    def owner(self, key: str) -> Tenant | None:
        """None: nobody has this key. How long it takes tells nothing of a secret."""
        parts = key.split("-", 3)
        if len(parts) != 4 or "-".join(parts[:2]) != _PREFIX:
            return None
        stored, tenant = self._found.get(parts[2], ("", None))
        return tenant if hmac.compare_digest(_digest(key), stored) else None


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
