"""Requests to the HTTP port of a front end, and what each caller may have answered."""

from __future__ import annotations

import enum
import http.client
import json
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from frontend_svc.api_server.tenants import SERVED_ROUTES
from tests.harness.servers import MODEL
from tests.strangers.routes import Route

_CALL_S: Final = 20.0
_BODY_BYTES: Final = 1_000
WEBSOCKET: Final = "WEBSOCKET"
PREFLIGHT: Final = "PREFLIGHT"
"""OPTIONS as a browser asks whether a page may send a request."""
_METHODS: Final = (
    "GET",
    "HEAD",
    "POST",
    "PUT",
    "PATCH",
    "DELETE",
    "OPTIONS",
    "TRACE",
    PREFLIGHT,
    WEBSOCKET,
)
_ORIGIN: Final = {"Origin": "http://page.test", "Access-Control-Request-Method": "POST"}
# Of the app's replies to it, which no handler makes.
_PREFLIGHT_BODIES: Final = (b"OK", b"Disallowed CORS")
# Not vLLM's: ours, and one that nobody serves, as a route of the next version of vLLM.
_FURTHER: Final = (Route("/ready", ("GET",)), Route("/", ("GET",)), Route("/not/yet/known", ("GET", "POST")))
_UPGRADE: Final = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "c3RyYW5nZXJzLWtleS0xMg==",
}
# Enough for an open route to compute something.
_BODY: Final = json.dumps(
    {
        "model": MODEL,
        "prompt": "x",
        "input": "x",
        "messages": [{"role": "user", "content": "x"}],
        "tokens": [120],
        "token_ids": [120],
        "max_tokens": 1,
    }
).encode()


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A method and what is sent as its target; `path` is how the Python app reads the target."""

    method: str
    target: str
    path: str

    def __str__(self) -> str:
        return f"{self.method} {self.target}"


@dataclass(frozen=True, slots=True)
class Reply:
    """A status, 0 if there was no reply, and the beginning of the body."""

    status: int
    body: bytes = b""


class Kind(enum.Enum):
    """What a caller is."""

    STRANGER = enum.auto()
    # With a key, for the model that is asked for and for another one.
    TENANT = enum.auto()
    TENANT_OF_ANOTHER_MODEL = enum.auto()
    # With the one key of all users.
    USER = enum.auto()


@dataclass(frozen=True, slots=True)
class Visitor:
    """A caller of the HTTP port. `authorization`: the header; empty: none."""

    name: str
    kind: Kind
    authorization: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a front end answers without a key, by design: pairs of method and path.

    Docs list them (docs/api-servers.md, docs/security.md); they are repeated here, so that an addition to the
    code alone is noticed.
    """

    open_requests: frozenset[tuple[str, str]]
    # Paths that are answered whatever the method.
    open_paths: frozenset[str] = frozenset()
    # Whether browsers' preflight requests, which carry no key, are answered.
    answers_preflights: bool = False
    # Whether a request without a key for what is not served gets 404 or 405, with no body, and any OPTIONS
    # what a preflight request gets.
    tells_what_is_not_served: bool = False
    # Whether an edge answers: it reads `..` as a step up, and asks no key of any OPTIONS.
    is_edge: bool = False

    def read(self, request: HttpRequest) -> HttpRequest:
        """Return the request as the server reads it."""
        if not self.is_edge:
            return request
        path = posixpath.normpath(request.path) if "/../" in request.path else request.path
        method = "GET" if request.method == "HEAD" else request.method
        return replace(request, method=method, path=path)

    def is_open(self, request: HttpRequest) -> bool:
        """Return whether the request may be answered without a key."""
        # HEAD is GET without a body, and a server without WebSockets ignores the upgrade.
        method = "GET" if request.method == "HEAD" else request.method
        if method == WEBSOCKET and self.tells_what_is_not_served:
            method = "GET"
        if request.path in self.open_paths and method != WEBSOCKET:
            return True
        return (method, request.path) in self.open_requests


_EDGE_OPEN: Final = ("/health", "/ready", "/ping")
_PROBES: Final = frozenset({("GET", "/health"), ("GET", "/version")})
TENANTS: Final = Rules(_PROBES | {("GET", "/ready"), ("GET", "/ping")})
ONE_KEY: Final = Rules(
    TENANTS.open_requests | {("POST", "/ping"), ("GET", "/load"), ("GET", "/metrics")},
    # The app answers 405 to all other methods but for metrics, which it shows to each.
    open_paths=frozenset({"/health", "/version", "/ping", "/load", "/metrics"}),
    answers_preflights=True,
)
ONE_KEY_RUST: Final = Rules(
    _PROBES
    | {("GET", "/load"), ("GET", "/metrics"), ("GET", "/kv_event_sources")}
    | {("POST", "/tokenize"), ("POST", "/detokenize")},
    answers_preflights=True,
    tells_what_is_not_served=True,
)
EDGE: Final = Rules(
    frozenset({("GET", path) for path in _EDGE_OPEN}), open_paths=frozenset(_EDGE_OPEN), is_edge=True
)
"""Before front ends of both kinds; what these check themselves comes after it."""


class HttpOutcome(enum.StrEnum):
    """How a request ended, compared with how it must."""

    REFUSED = "refused"
    # No handler was reached: 404 or 405 of the router, or the reply to a preflight request.
    NOT_SERVED = "not served"
    OPEN = "open by design"
    # What the caller's own key allows.
    OWN = "own"
    IMPROPER = "improper"
    # Refused although it is open by design or the caller's own.
    MISSING = "refused by mistake"


def http_outcome(rules: Rules, visitor: Visitor, request: HttpRequest, reply: Reply) -> HttpOutcome:
    """Judge a reply."""
    request = rules.read(request)
    refused = reply.status == 401 or (request.method == WEBSOCKET and reply.status == 403)
    from_router = reply.status in (404, 405)
    answered = bool(reply.status) and not refused and not from_router
    if (request.method, request.target) in rules.open_requests:
        return HttpOutcome.OPEN if answered else HttpOutcome.MISSING
    if rules.is_open(request):
        if answered:
            return HttpOutcome.OPEN
        if from_router:
            return HttpOutcome.NOT_SERVED
    if visitor.kind is Kind.USER:
        return HttpOutcome.OWN if reply.status and not refused else HttpOutcome.MISSING
    if rules.is_edge and request.method in ("OPTIONS", PREFLIGHT):
        return HttpOutcome.NOT_SERVED if _is_preflight(reply) else HttpOutcome.IMPROPER
    if visitor.kind is Kind.STRANGER:
        return _outcome_of_stranger(rules, request, reply, refused=refused)
    if (request.method, request.path) not in SERVED_ROUTES:
        refused = reply.status == 404 or (request.method == WEBSOCKET and reply.status == 403)
        # Before any path the edge checks the model; a front end with vLLM's Rust API server answers 405.
        by_model = reply.status == 403 and visitor.kind is Kind.TENANT_OF_ANOTHER_MODEL
        refused = refused or (rules.is_edge and (from_router or by_model))
        return HttpOutcome.REFUSED if refused else HttpOutcome.IMPROPER
    if visitor.kind is Kind.TENANT_OF_ANOTHER_MODEL and request.method != "GET":
        return HttpOutcome.REFUSED if reply.status == 403 else HttpOutcome.IMPROPER
    return HttpOutcome.MISSING if reply.status in (0, 401, 403) else HttpOutcome.OWN


def _is_preflight(reply: Reply) -> bool:
    """Return whether no handler was reached: only the API server's router, or its check of the key."""
    return reply.status in (401, 404, 405, 501) or reply.body.startswith(_PREFLIGHT_BODIES) or not reply.body


def _outcome_of_stranger(rules: Rules, request: HttpRequest, reply: Reply, *, refused: bool) -> HttpOutcome:
    if refused:
        return HttpOutcome.REFUSED
    told = rules.tells_what_is_not_served and not reply.body
    is_options = request.method in ("OPTIONS", PREFLIGHT)
    is_preflight = request.method == PREFLIGHT and rules.answers_preflights
    if told and (reply.status in (404, 405) or (is_options and reply.status == 200)):
        return HttpOutcome.NOT_SERVED
    # 501: routes that control a single engine, which the front end serves to nobody.
    if is_preflight and (reply.body.startswith(_PREFLIGHT_BODIES) or reply.status == 501):
        return HttpOutcome.NOT_SERVED
    return HttpOutcome.IMPROPER


def http_requests(routes: Iterable[Route]) -> list[HttpRequest]:
    """Return every path with every method, and its declared methods with targets that a check of the path may
    read differently than the router."""
    declared: dict[str, set[str]] = {}
    for route in (*routes, *_FURTHER):
        declared.setdefault(route.path, set()).update(route.methods)
        # A mounted app has all paths below its own.
        declared.setdefault(f"{route.path.rstrip('/')}/x", set()).update(route.methods)
    requests: dict[HttpRequest, None] = {}
    for path, methods in sorted(declared.items()):
        requests.update(dict.fromkeys(HttpRequest(method, path, path) for method in _METHODS))
        for target, read_as in _disguised(path):
            requests.update(
                dict.fromkeys(HttpRequest(method, target, read_as) for method in sorted(methods or {"GET"}))
            )
    return list(requests)


def declared_requests(routes: Iterable[Route]) -> list[HttpRequest]:
    """Return every path with its declared methods."""
    pairs = {(method, route.path) for route in routes for method in route.methods}
    return [HttpRequest(method, path, path) for method, path in sorted(pairs)]


def _disguised(path: str) -> Iterator[tuple[str, str]]:
    yield f"{path}/", f"{path}/"
    yield f"/{path}", f"/{path}"
    yield f"/health/..{path}", f"/health/..{path}"
    if len(path) > 1:
        yield f"/%{ord(path[1]):02X}{path[2:]}", path
        yield path.upper(), path.upper()


def call_http(host: str, port: int, visitor: Visitor, requests: Sequence[HttpRequest]) -> list[Reply]:
    """Send the requests, one after the other; return the replies in their order."""
    replies = []
    connection = http.client.HTTPConnection(host, port, timeout=_CALL_S)
    try:
        for request in requests:
            # The server may have closed the connection after its last reply.
            reply = _attempt(connection, visitor, request)
            replies.append(reply if reply.status else _attempt(connection, visitor, request))
    finally:
        connection.close()
    return replies


def _attempt(connection: http.client.HTTPConnection, visitor: Visitor, request: HttpRequest) -> Reply:
    headers = {"Content-Type": "application/json"}
    if visitor.authorization:
        headers["Authorization"] = visitor.authorization
    method, body = request.method, _BODY
    if method == WEBSOCKET:
        method, headers = "GET", headers | _UPGRADE
    if method == PREFLIGHT:
        method, headers = "OPTIONS", headers | _ORIGIN
    if method in ("GET", "HEAD", "OPTIONS", "TRACE"):
        body = b""
    try:
        connection.request(method, request.target, body or None, headers)
        response = connection.getresponse()
        if request.method == WEBSOCKET:
            # What follows a handshake is no body.
            return Reply(response.status)
        beginning = response.read(_BODY_BYTES)
        response.read()
        return Reply(response.status, beginning)
    except (http.client.HTTPException, OSError):
        connection.close()
        return Reply(0)
    finally:
        if request.method == WEBSOCKET:
            connection.close()
