"""Turn what the admin API raises into the status of the call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc

from scheduler_svc.admin.methods import ADMIN
from scheduler_svc.refused import Refused
from tailrace.policy.parameters import ParameterError
from tailrace.security.handlers import Context, Handler, surrounded
from tailrace.service.answered import ANSWERED
from tailrace.store.errors import StoreUnavailable


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
        return surrounded(handler, _answered)


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
