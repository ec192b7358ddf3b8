"""The console's HTTP server: the page, what it shows as JSON, and the operator's actions.

A browser can be made to send requests by any page that its user visits. So a request must name this server as
its host (against DNS rebinding), and one that acts must come from the page itself. What the cluster says is
sent as JSON only, and the page's policy forbids any script but its own.
"""

from __future__ import annotations

import asyncio
import datetime
import hmac
import ipaddress
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import Final

import grpc
import msgspec
from aiohttp import web
from google.protobuf.message import DecodeError

from console_svc.actions import ACTIONS, Action, Invalid, Refused, read_action
from console_svc.clusters import Clusters, TooManyViewers, UnknownCluster
from console_svc.fleet import reason_of
from tailrace.security.audit import AuditEntry, AuditSink

log = logging.getLogger(__name__)

HEADER: Final = "X-Tailrace-Console"
"""Header of every request that acts; another site's page cannot send it."""

_BODY_BYTES_MAX: Final = 65_536
# Calls besides the streams of snapshots.
_CALLS_MAX: Final = 32
# A viewer that does not read for so long is disconnected.
_STALLED_S: Final = 30.0
_ID_MAX: Final = 500
_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_STATUS: Final[Mapping[grpc.StatusCode, int]] = MappingProxyType(
    {
        grpc.StatusCode.INVALID_ARGUMENT: 400,
        grpc.StatusCode.FAILED_PRECONDITION: 409,
        grpc.StatusCode.NOT_FOUND: 404,
        grpc.StatusCode.PERMISSION_DENIED: 403,
        grpc.StatusCode.UNAUTHENTICATED: 403,
        grpc.StatusCode.UNAVAILABLE: 503,
        grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    }
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Site:
    """The pages of one console."""

    def __init__(self, clusters: Clusters, audit: AuditSink, host: str, token: str) -> None:
        """`host`: where it listens; `token`: what a request must bring, empty: nothing."""
        self._clusters = clusters
        self._audit = audit
        self._host = host
        self._token = token.encode()
        self._calls = 0
        self._files = {
            entry.name: (entry.read_bytes(), _TYPES[f".{entry.name.rpartition('.')[2]}"])
            for entry in files("console_svc").joinpath("page").iterdir()
            if f".{entry.name.rpartition('.')[2]}" in _TYPES
        }

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(middlewares=[self._checked], client_max_size=_BODY_BYTES_MAX)
        app.router.add_get("/health", self._health)
        app.router.add_get("/", self._file)
        app.router.add_get("/page/{name}", self._file)
        app.router.add_get("/api/events", self._events)
        app.router.add_get("/api/requests/{id}", self._life)
        app.router.add_get("/api/policies", self._policies)
        app.router.add_post("/api/actions/{name}", self._act)
        app.on_response_prepare.append(_with_headers)
        return app

    @web.middleware
    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer only those who may ask, and turn errors into replies."""
        if (refusal := self._refusal(request)) is not None:
            return refusal
        counts = request.path.startswith("/api/") and request.path != "/api/events"
        if counts and self._calls >= _CALLS_MAX:
            return _error(503, "too many calls at once; try again")
        self._calls += counts
        try:
            return await handler(request)
        except grpc.aio.AioRpcError as error:
            return _error(_STATUS.get(error.code(), 502), reason_of(error))
        except TooManyViewers as error:
            return _error(503, str(error))
        except UnknownCluster as error:
            return _error(404, str(error))
        except DecodeError as error:
            return _error(502, f"the trace cannot be read: {error}")
        finally:
            self._calls -= counts

    def _refusal(self, request: web.Request) -> web.Response | None:
        if not self._token and not self._is_own_host(request.host):
            return _error(403, f"this is not {request.host[:100]!r}: use the address that it listens on")
        if not request.path.startswith("/api/"):
            return None
        # Browsers say whose page it is that asks.
        if request.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            return _error(403, "only the console's own page is answered")
        if self._token:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            # Bytes that are no text come as surrogates.
            as_sent = given.encode(errors="surrogateescape")
            if scheme != "Bearer" or not hmac.compare_digest(as_sent, self._token):
                return _error(401, "the console's token is needed")
        if request.method != "GET":
            scheme, _, origin = request.headers.get("Origin", f"{request.scheme}://{request.host}").partition(
                "://"
            )
            # A proxy before it may add the TLS, but none takes it away.
            if (
                HEADER not in request.headers
                or origin != request.host
                or (request.secure and scheme != "https")
            ):
                return _error(403, "actions are taken from the console's own page only")
            if request.content_type != "application/json":
                return _error(415, "JSON expected")
        return None

    def _is_own_host(self, host: str) -> bool:
        """Return whether a Host header names this server: by an address, which no name can be bound to, or by
        the name that it listens on."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name.lower() in ("localhost", self._host.lower())
        return True

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _file(self, request: web.Request) -> web.Response:
        found = self._files.get(request.match_info.get("name", "index.html"))
        if found is None:
            raise web.HTTPNotFound
        body, content_type = found
        return web.Response(body=body, content_type=content_type, charset="utf-8")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Stream the snapshots as server-sent events."""
        async with self._clusters.watched(_cluster(request)) as snapshots:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            try:
                await response.prepare(request)
                await self._send(response, snapshots)
            except (ConnectionResetError, TimeoutError) as error:
                log.debug("a viewer is gone: %s", error)
            return response

    async def _send(self, response: web.StreamResponse, snapshots: AsyncIterator[bytes]) -> None:
        async for encoded in snapshots:
            async with asyncio.timeout(_STALLED_S):
                await response.write(b"data: " + encoded + b"\n\n")

    async def _life(self, request: web.Request) -> web.Response:
        request_id = request.match_info["id"]
        if len(request_id) > _ID_MAX:
            return _error(400, "no request has so long an id")
        fleet = await self._clusters.fleet(_cluster(request))
        return _json(await fleet.life(request_id))

    async def _policies(self, request: web.Request) -> web.Response:
        fleet = await self._clusters.fleet(_cluster(request))
        return _json(await fleet.policies())

    async def _act(self, request: web.Request) -> web.Response:
        """Carry out an action; write one line of the audit log, whatever comes of it."""
        kind = ACTIONS.get(request.match_info["name"])
        if kind is None:
            return _error(404, "no such action")
        try:
            asked = read_action(kind, await request.read())
        except Invalid as error:
            return _error(400, str(error))
        cluster = _cluster(request)
        fleet = await self._clusters.fleet(cluster)
        began_s, outcome, details = time.monotonic(), grpc.StatusCode.UNKNOWN.name, ""
        try:
            done = await asked.carry_out(fleet.stub)
            outcome, details = grpc.StatusCode.OK.name, done
            fleet.ask_again()
            return _json({"done": done})
        except grpc.aio.AioRpcError as error:
            outcome, details = error.code().name, reason_of(error)
            raise
        except Invalid as error:
            outcome, details = grpc.StatusCode.INVALID_ARGUMENT.name, str(error)
            return _error(400, str(error))
        except Refused as error:
            outcome, details = grpc.StatusCode.ABORTED.name, str(error)
            return _error(409, str(error))
        except asyncio.CancelledError:
            outcome = grpc.StatusCode.CANCELLED.name
            raise
        finally:
            self._audit.write(
                AuditEntry(
                    time=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
                    who=fleet.who,
                    peer=request.remote or "",
                    on_behalf_of="",
                    what=kind.__name__,
                    request=_asked(asked, cluster),
                    outcome=outcome,
                    details=details,
                    seconds=round(time.monotonic() - began_s, 3),
                )
            )


def _cluster(request: web.Request) -> str:
    """Return the cluster that a request is about; empty: the console's own."""
    return request.query.get("cluster", "")


def _asked(action: Action, cluster: str) -> dict[str, object]:
    """Return an action for the audit log."""
    asked: dict[str, object] = msgspec.to_builtins(action)
    return {"cluster": cluster, **asked} if cluster else asked


async def _with_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)


def _json(content: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")


def _error(status: int, text: str) -> web.Response:
    return _json({"error": text}, status)
