"""The access table: which roles may call which gRPC method. A method that is not in the table is denied to
all."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Final

import grpc

from tailrace.security.handlers import Context, Handler, wrap_handler
from tailrace.security.roles import MEMBERS, OPERATORS, Identity, NoIdentity, Role, identity_of

_EVERYBODY: Final = frozenset(Role)
# A standby scheduler forwards operators' calls to the leader.
_READS: Final = OPERATORS | {Role.SCHEDULER}
_CHANGE: Final = frozenset({Role.ADMIN, Role.SCHEDULER})
_SCHEDULER: Final = frozenset({Role.SCHEDULER})
_WORKER: Final = frozenset({Role.WORKER})

_BY_SERVICE: Final[Mapping[str, Mapping[str, frozenset[Role]]]] = {
    "tailrace.v1.Admin": {
        "ListInstances": _READS,
        "ListRequests": _READS,
        "ListMigrations": _READS,
        "ListPolicies": _READS,
        "ListStages": _READS,
        "ListServices": _READS,
        "ListProfiles": _READS,
        "ListModels": _READS,
        "WatchRollout": _READS,
        "GetSlo": _READS,
        "GetTrace": _READS,
        "GetShadow": _READS,
        # It changes nothing, but reveals more than a viewer may see.
        "Record": _CHANGE,
        "SetShadow": _CHANGE,
        "SetPolicy": _CHANGE,
        "SetSlo": _CHANGE,
        "SetPool": _CHANGE,
        "SetStages": _CHANGE,
        "Migrate": _CHANGE,
        "Drain": _CHANGE,
        "Rollout": _CHANGE,
        "UndoRollout": _CHANGE,
        "ForgetRollout": _CHANGE,
        "Profile": _CHANGE,
    },
    "tailrace.v1.Scheduler": {
        "Place": frozenset({Role.FRONTEND}),
    },
    "tailrace.v1.Monitor": {"Report": _WORKER, "Watch": _SCHEDULER, "GetTrace": _SCHEDULER},
    "tailrace.v1.Migration": {
        # Workers call it for requests that they win by bid-ask.
        "Migrate": _SCHEDULER | _WORKER,
        "ListMigrations": _SCHEDULER,
    },
    "tailrace.v1.Worker": {
        "Export": _WORKER,
        "Import": frozenset({Role.MIGRATION}),
        "CancelImport": frozenset({Role.MIGRATION}),
        "HandBackPrompts": _SCHEDULER,
        "Profile": _SCHEDULER,
    },
    "tailrace.v1.BidAsk": {"Offer": _SCHEDULER, "Tell": _WORKER},
    "tailrace.v1.Answers": {
        "Keep": frozenset({Role.FRONTEND}),
        "Find": frozenset({Role.FRONTEND}),
        "Claim": frozenset({Role.FRONTEND}),
    },
    "tailrace.v1.Usage": {"Watch": frozenset({Role.EDGE})},
    "tailrace.v1.Cache": {"ListBlocks": _SCHEDULER, "Lend": _WORKER, "Prompt": _WORKER, "Copy": _SCHEDULER},
    "opentelemetry.proto.collector.trace.v1.TraceService": {"Export": MEMBERS | {Role.TELEMETRY}},
    "grpc.health.v1.Health": {"Check": _EVERYBODY, "Watch": _EVERYBODY},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": OPERATORS},
}

METHODS: Final[Mapping[str, frozenset[Role]]] = MappingProxyType(
    {
        f"/{service}/{method}": roles
        for service, methods in _BY_SERVICE.items()
        for method, roles in methods.items()
    }
)
"""Roles by `/package.Service/Method`."""

CHANGES: Final = frozenset(
    f"/tailrace.v1.Admin/{method}"
    for method, roles in _BY_SERVICE["tailrace.v1.Admin"].items()
    if Role.VIEWER not in roles
)
"""Methods of the admin API that change something."""

METRICS: Final = OPERATORS | {Role.TELEMETRY}
"""Roles that may read /metrics."""

NOBODY: Final[frozenset[Role]] = frozenset()


def allowed(method: str) -> frozenset[Role]:
    """Return the roles that may call `/package.Service/Method`."""
    return METHODS.get(method, NOBODY)


def denial(role: Role, name: str, method: str) -> str:
    """Return the one-line reason for refusing the call."""
    needed = allowed(method)
    if not needed:
        return f"{method} is not available to any role"
    roles = " or ".join(sorted(role.value for role in needed))
    return f"the certificate of {name} has role {role.value}; {method} requires {roles}"


log = logging.getLogger(__name__)

_URIS: Final = "peer_uri"


def caller(context: Context) -> Identity:
    """Return the caller's identity from its verified certificate. Raise NoIdentity."""
    uris = context.auth_context().get(_URIS, ())
    return identity_of(uri.decode(errors="replace") for uri in uris)


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Refuse a call with PERMISSION_DENIED unless the access table lists the caller's role for its method."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method

        @asynccontextmanager
        async def checked(request: object, context: Context) -> AsyncIterator[None]:
            await _check(method, context)
            yield

        return wrap_handler(handler, checked)


async def _check(method: str, context: Context) -> None:
    """Abort the call unless its caller is authorized."""
    try:
        identity = caller(context)
    except NoIdentity as error:
        reason, code = str(error), grpc.StatusCode.UNAUTHENTICATED
    else:
        if identity.role in allowed(method):
            return
        reason, code = denial(identity.role, identity.name, method), grpc.StatusCode.PERMISSION_DENIED
    log.warning("refused a call from %s: %s", context.peer(), reason)
    await context.abort(code, reason)
