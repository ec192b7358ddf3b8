"""Tenants and their API keys as stored. A key itself is shown once and never stored."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import Annotated, Final, NamedTuple, Self

import msgspec

_PREFIX: Final = "sk-tailrace"
_SECRET_BYTES: Final = 32
_ID_BYTES: Final = 6

KEY_REQUIRED: Final = "This API requires a valid key: send the header 'Authorization: Bearer KEY'."
"""The answer to a request without one."""

MIN_WEIGHT: Final = 0.01
MAX_WEIGHT: Final = 100.0
"""Bounds of a weight; beyond them use the settings for limits instead."""

MIN_BURST_S: Final = 1.0
MAX_BURST_S: Final = 60.0
"""Bounds of what a tenant may save up, in seconds' worth of its rates."""


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the holders of a tenant's keys may do. 0 in a limit: unlimited.

    Defaults are not written, so that earlier versions read a file that uses nothing newer.
    """

    name: str
    # Names of models or adapters as clients send them; empty: all.
    models: tuple[str, ...] = ()
    # Counted by sequence, as concurrency is: of three prompts with four answers each, twelve.
    requests_per_minute: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    # Prompts and answers together.
    tokens_per_minute: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    # Sequences in progress.
    concurrency: Annotated[int, msgspec.Meta(ge=0)] = 0
    # vLLM's priority: a smaller one is served first, if the engines order requests by priority.
    priority: int = 0
    # Longest prompt in tokens.
    longest_prompt: Annotated[int, msgspec.Meta(ge=0)] = 0
    # Its share of the fleet among waiting tenants, if front ends make them wait (--fair-backlog).
    weight: Annotated[float, msgspec.Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)] = 1.0
    # How much of its rates it may save up and use at once.
    burst_seconds: Annotated[float, msgspec.Meta(ge=MIN_BURST_S, le=MAX_BURST_S)] = MAX_BURST_S
    # Tenants with the same name here share what the fleet caches of their prompts; empty: shared with nobody.
    shared_cache: str = ""

    def may_use(self, name: str) -> bool:
        """Return whether it may use the model or adapter of that name."""
        return not self.models or name in self.models

    def cache_salt(self, client_salt: str | None) -> str:
        """Return the salt of the tenant's prompts in prefix caches. `client_salt`: the client's own.

        vLLM accepts no slash from clients, so no other salt equals it, with or without a key.
        """
        kind, name = ("shared", self.shared_cache) if self.shared_cache else ("tenant", self.name)
        return f"/{kind}/{len(name)}/{name}/{client_salt or ''}"


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The stored part of a key."""

    # Part of the key itself, in plain text.
    key_id: str
    # SHA-256 of the whole key, hexadecimal. The key has 256 random bits, so a slow hash would add nothing.
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    tenant: str
    # UTC, ISO 8601.
    created: str


EDGES: Final = "edges"
"""ID of the key that edges show to vllm-rs. It has no tenant, and no user's key can have this ID."""


class TenantKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All tenants and keys."""

    tenants: tuple[Tenant, ...] = ()
    keys: tuple[ApiKey, ...] = ()

    def tenant(self, name: str) -> Tenant | None:
        """Return the tenant of that name, or None."""
        return next((tenant for tenant in self.tenants if tenant.name == name), None)

    def with_tenant(self, tenant: Tenant) -> TenantKeys:
        """Return a copy with this tenant, replacing an older one of its name."""
        others = [other for other in self.tenants if other.name != tenant.name]
        return msgspec.structs.replace(self, tenants=(*others, tenant))

    def with_key(self, tenant: str, created: str) -> tuple[TenantKeys, str]:
        """Return a copy with a new key of the tenant, and the key."""
        key_id = secrets.token_hex(_ID_BYTES)
        key = f"{_PREFIX}-{key_id}-{secrets.token_urlsafe(_SECRET_BYTES)}"
        entry = ApiKey(key_id=key_id, sha256=_digest(key), tenant=tenant, created=created)
        return msgspec.structs.replace(self, keys=(*self.keys, entry)), key

    @property
    def edge_key(self) -> str:
        """Return the key that edges show to front ends with vllm-rs; empty if there is none."""
        entry = next((key for key in self.keys if key.key_id == EDGES), None)
        return "" if entry is None else f"{_PREFIX}-{EDGES}-{entry.sha256}"

    def with_edge_key(self, created: str) -> TenantKeys:
        """Return a copy that has a key for edges: a random one, unless there is one.

        Nobody but the file's readers knows it, so it is stored as it is, where others have their digest.
        """
        if self.edge_key:
            return self
        entry = ApiKey(key_id=EDGES, sha256=secrets.token_hex(_SECRET_BYTES), tenant="", created=created)
        return msgspec.structs.replace(self, keys=(entry, *self.keys))

    def without_key(self, key_id: str) -> TenantKeys:
        """Return a copy without a key; its tenant and limits stay. Raise KeyError."""
        remaining = tuple(key for key in self.keys if key.key_id != key_id)
        if len(remaining) == len(self.keys):
            raise KeyError(key_id)
        return msgspec.structs.replace(self, keys=remaining)

    def without_tenant(self, name: str) -> TenantKeys:
        """Return a copy without a tenant and its keys. Raise KeyError."""
        if self.tenant(name) is None:
            raise KeyError(name)
        return TenantKeys(
            tenants=tuple(tenant for tenant in self.tenants if tenant.name != name),
            keys=tuple(key for key in self.keys if key.tenant != name),
        )


class Holder(NamedTuple):
    """Who sends a request."""

    tenant: Tenant
    key_id: str


class KeyIndex:
    """Find the tenant of a key."""

    def __init__(self, tenant_keys: TenantKeys) -> None:
        self.tenants: Mapping[str, Tenant] = {tenant.name: tenant for tenant in tenant_keys.tenants}
        self.edge_key = tenant_keys.edge_key
        self._by_key_id = {
            key.key_id: (key.sha256, self.tenants[key.tenant])
            for key in tenant_keys.keys
            if key.tenant in self.tenants
        }

    def bearer(self, authorization: str) -> Holder | None:
        """Return the holder of the key in an Authorization header, or None."""
        scheme, _, key = authorization.partition(" ")
        return self.holder(key.strip()) if scheme.lower() == "bearer" else None

    def holder(self, key: str) -> Holder | None:
        """Return the key's holder, or None. The duration reveals nothing about stored keys."""
        parts = key.split("-", 3)
        if len(parts) != 4 or "-".join(parts[:2]) != _PREFIX:
            return None
        stored, tenant = self._by_key_id.get(parts[2], ("", None))
        is_key = hmac.compare_digest(_digest(key), stored)
        return None if tenant is None or not is_key else Holder(tenant, parts[2])

    def tenant_of(self, key_id: str) -> Tenant | None:
        """Return the tenant of the key with this ID, or None."""
        return self._by_key_id.get(key_id, ("", None))[1]


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


# The tenant and weight that travel with a request.
#
# vLLM's API server puts them among the request's trace headers; of a client's own headers it accepts only
# `traceparent` and `tracestate` there.

SHARE_HEADER: Final = "tailrace-tenant"


class Share(NamedTuple):
    """A tenant's name and weight; the default for requests without a tenant."""

    tenant: str = ""
    weight: float = 1.0

    def encode(self) -> str:
        """Return the header's value."""
        return f"{self.weight!r} {self.tenant}"

    @classmethod
    def decode(cls, value: str) -> Self:
        """Parse a header's value; return the default if it is invalid."""
        weight, space, tenant = value.partition(" ")
        try:
            share = cls(tenant, float(weight))
        except ValueError:
            return cls()
        return share if space and MIN_WEIGHT <= share.weight <= MAX_WEIGHT else cls()
