"""The error of the admin API, and how exceptions become gRPC statuses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import grpc

from tailrace.policy.parameters import ParameterError
from tailrace.security.handlers import Context, Handler, wrap_handler
from tailrace.service.channels import FROM_SERVER
from tailrace.store.client import StoreUnavailable
from tailrace.v1 import admin_pb2

SERVICE: Final = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
ADMIN: Final = f"/{SERVICE.full_name}/"
"""Prefix of the gRPC names of all methods."""


class AdminError(Exception):
    """A call that fails with a gRPC status. `details` is one line that names the field, if there is one."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class AdminErrors(grpc.aio.ServerInterceptor):
    """Abort calls that raised with the matching status, marked as this server's own reply."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the handlers of the admin API; see grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(ADMIN):
            return handler
        return wrap_handler(handler, _abort_on_error)


@asynccontextmanager
async def _abort_on_error(request: object, context: Context) -> AsyncIterator[None]:
    try:
        yield
    except AdminError as error:
        await context.abort(error.code, error.details, (FROM_SERVER,))
    except ParameterError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error), (FROM_SERVER,))
    except StoreUnavailable as error:
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error), (FROM_SERVER,))
    except grpc.aio.AioRpcError as error:
        # From another service that this call used.
        await context.abort(error.code(), error.details() or error.code().name, (FROM_SERVER,))
