"""What `make strangers` requests of HTTP ports, and how it judges the replies."""

from __future__ import annotations

import pytest

from frontend_svc.api_server import middleware, tenants
from tests.strangers.http_calls import (
    EDGE,
    ONE_KEY,
    ONE_KEY_RUST,
    PREFLIGHT,
    TENANTS,
    WEBSOCKET,
    HttpOutcome,
    HttpRequest,
    Kind,
    Reply,
    Rules,
    Visitor,
    http_outcome,
    http_requests,
)
from tests.strangers.routes import Route, app_routes

_REFUSED, _UNSERVED, _OPEN = HttpOutcome.REFUSED, HttpOutcome.NOT_SERVED, HttpOutcome.OPEN
_IMPROPER, _MISSING, _OWN = HttpOutcome.IMPROPER, HttpOutcome.MISSING, HttpOutcome.OWN
_JSON = b'{"detail": "x"}'


def _judge(rules: Rules, kind: Kind, method: str, path: str, reply: Reply) -> HttpOutcome:
    return http_outcome(rules, Visitor("v", kind), HttpRequest(method, path, path), reply)


@pytest.mark.parametrize(
    ("rules", "method", "path", "reply", "outcome"),
    [
        (TENANTS, "POST", "/v1/completions", Reply(401), _REFUSED),
        (TENANTS, "POST", "/v1/completions", Reply(200), _IMPROPER),
        # It passed the check of the key.
        (TENANTS, "POST", "/v1/completions", Reply(400, _JSON), _IMPROPER),
        (TENANTS, "GET", "/unknown", Reply(404, _JSON), _IMPROPER),
        (TENANTS, "GET", "/load", Reply(200), _IMPROPER),
        (TENANTS, "POST", "/tokenize", Reply(0), _IMPROPER),
        (TENANTS, "GET", "/health", Reply(200), _OPEN),
        (TENANTS, "GET", "/health", Reply(401), _MISSING),
        (TENANTS, "HEAD", "/health", Reply(405), _UNSERVED),
        (TENANTS, "POST", "/health", Reply(200), _IMPROPER),
        (TENANTS, WEBSOCKET, "/v1/realtime", Reply(403), _REFUSED),
        (TENANTS, WEBSOCKET, "/v1/realtime", Reply(101), _IMPROPER),
        (ONE_KEY, WEBSOCKET, "/metrics", Reply(500), _IMPROPER),
        (ONE_KEY, "OPTIONS", "/metrics/x", Reply(200, b"# HELP"), _IMPROPER),
        (ONE_KEY, "POST", "/metrics", Reply(200), _OPEN),
        (ONE_KEY, PREFLIGHT, "/tokenize", Reply(200, b"OK"), _UNSERVED),
        (ONE_KEY, PREFLIGHT, "/tokenize", Reply(400, b"Disallowed CORS origin"), _UNSERVED),
        (ONE_KEY, PREFLIGHT, "/tokenize", Reply(200, _JSON), _IMPROPER),
        (ONE_KEY, "POST", "/sleep", Reply(501, _JSON), _IMPROPER),
        (ONE_KEY_RUST, "POST", "/tokenize", Reply(200), _OPEN),
        (ONE_KEY_RUST, "POST", "/sleep", Reply(404), _UNSERVED),
        (ONE_KEY_RUST, "POST", "/sleep", Reply(500, _JSON), _IMPROPER),
        (ONE_KEY_RUST, "GET", "/v1/responses/x", Reply(404, _JSON), _IMPROPER),
    ],
)
def test_reply_to_a_stranger(
    rules: Rules, method: str, path: str, reply: Reply, outcome: HttpOutcome
) -> None:
    assert _judge(rules, Kind.STRANGER, method, path, reply) is outcome


@pytest.mark.parametrize(
    ("kind", "method", "path", "status", "outcome"),
    [
        (Kind.TENANT, "POST", "/v1/completions", 200, _OWN),
        (Kind.TENANT, "POST", "/v1/completions", 401, _MISSING),
        (Kind.TENANT, "POST", "/sleep", 404, _REFUSED),
        (Kind.TENANT, "POST", "/sleep", 501, _IMPROPER),
        (Kind.TENANT_OF_ANOTHER_MODEL, "POST", "/v1/completions", 403, _REFUSED),
        (Kind.TENANT_OF_ANOTHER_MODEL, "POST", "/v1/completions", 200, _IMPROPER),
        (Kind.TENANT_OF_ANOTHER_MODEL, "GET", "/v1/models", 200, _OWN),
    ],
)
def test_reply_to_a_tenant(kind: Kind, method: str, path: str, status: int, outcome: HttpOutcome) -> None:
    assert _judge(TENANTS, kind, method, path, Reply(status)) is outcome


@pytest.mark.parametrize(
    ("kind", "method", "path", "reply", "outcome"),
    [
        (Kind.STRANGER, "POST", "/v1/completions", Reply(401), _REFUSED),
        (Kind.STRANGER, "POST", "/v1/completions", Reply(404, _JSON), _IMPROPER),
        (Kind.STRANGER, "GET", "/v1/models", Reply(405, _JSON), _IMPROPER),
        (Kind.STRANGER, "GET", "/version", Reply(200, _JSON), _IMPROPER),
        (Kind.STRANGER, "GET", "/health/../ready", Reply(200), _OPEN),
        (Kind.STRANGER, "GET", "/health/../metrics", Reply(200), _IMPROPER),
        (Kind.STRANGER, WEBSOCKET, "/v1/realtime", Reply(101), _IMPROPER),
        (Kind.STRANGER, WEBSOCKET, "/health", Reply(403), _REFUSED),
        (Kind.STRANGER, PREFLIGHT, "/v1/completions", Reply(200), _UNSERVED),
        (Kind.STRANGER, PREFLIGHT, "/v1/completions", Reply(200, _JSON), _IMPROPER),
        (Kind.TENANT, "POST", "/v1/completions", Reply(200), _OWN),
        (Kind.TENANT, "POST", "/v1/completions", Reply(403), _MISSING),
        (Kind.TENANT, "POST", "/sleep", Reply(403), _IMPROPER),
        (Kind.TENANT, WEBSOCKET, "/v1/models", Reply(403), _REFUSED),
        (Kind.TENANT_OF_ANOTHER_MODEL, "PUT", "/tokenize", Reply(403), _REFUSED),
        (Kind.TENANT_OF_ANOTHER_MODEL, "POST", "/tokenize", Reply(200), _IMPROPER),
    ],
)
def test_reply_of_an_edge(kind: Kind, method: str, path: str, reply: Reply, outcome: HttpOutcome) -> None:
    assert _judge(EDGE, kind, method, path, reply) is outcome


def test_reply_to_the_user_with_the_key() -> None:
    replies = [_judge(ONE_KEY, Kind.USER, "POST", "/sleep", Reply(status)) for status in (501, 401, 0)]
    assert replies == [_OWN, _MISSING, _MISSING]


def test_every_method_and_disguise_of_a_new_route_is_tried() -> None:
    requests = http_requests([Route("/v9/new", ("POST",))])
    methods = {request.method for request in requests if request.target == "/v9/new"}
    assert {"GET", "POST", "DELETE", "OPTIONS", PREFLIGHT, WEBSOCKET} <= methods
    assert HttpRequest("POST", "/%769/new", "/v9/new") in requests
    assert HttpRequest("POST", "//v9/new", "//v9/new") in requests


def test_open_paths_are_those_of_the_rules() -> None:
    def paths(rules: Rules) -> set[str]:
        return {path for _, path in rules.open_requests} | rules.open_paths

    assert paths(ONE_KEY) == middleware.OPEN_PATHS | {middleware.READY_PATH}
    assert paths(TENANTS) == tenants.OPEN_PATHS | {middleware.READY_PATH}


@pytest.mark.slow
def test_routes_are_those_of_the_app_for_every_task_and_of_its_development_mode() -> None:
    paths = {route.path for route in app_routes()}
    assert {"/v1/completions", "/invocations", "/sleep", "/v1/load_lora_adapter", "/v1/realtime"} <= paths
