"""What the admin API raises, and the status of the call that it becomes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import grpc

from tailrace.policy.parameters import ParameterError
from tailrace.security.handlers import Context, Handler, wrap_handler
from tailrace.service.channels import ANSWERED
from tailrace.store.client import StoreUnavailable
from tailrace.v1 import admin_pb2

SERVICE: Final = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
ADMIN: Final = f"/{SERVICE.full_name}/"
"""What the names of all methods begin with, as gRPC has them."""


class Refused(Exception):
    """`details` says in one line what is wrong, and names the field where there is one."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class AdminErrors(grpc.aio.ServerInterceptor):
    """Ends a call that raised with the status of what was raised, marked as the server's own answer."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(ADMIN):
            return handler
        return wrap_handler(handler, _answered)


@asynccontextmanager
async def _answered(request: object, context: Context) -> AsyncIterator[None]:
    try:
        yield
    except Refused as error:
        await context.abort(error.code, error.details, (ANSWERED,))
    except ParameterError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error), (ANSWERED,))
    except StoreUnavailable as error:
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error), (ANSWERED,))
    except grpc.aio.AioRpcError as error:
        # From a service that was asked in turn.
        await context.abort(error.code(), error.details() or error.code().name, (ANSWERED,))
