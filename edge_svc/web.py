"""What the edge answers: Envoy's two questions about each request, and the paths that no model has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, Counter

from edge_svc.configuration import CLUSTER, KEY_CHECK, MODEL_CHOICE, OWN_PATHS, Bounds
from edge_svc.directory import Asked, Directory, Served
from tailrace.bounded import printable, shown
from tailrace.service.openai_error import error_body
from tailrace.tenancy.file import KeyFile
from tailrace.tenancy.keys import KEY_REQUIRED, Tenant

# A larger body is read in a thread.
_LARGE_BYTES: Final = 1 << 18
# Paths of API servers that are for users.
_ROUTES: Final = ("/v1/", "/v2/")
_OTHER_ROUTES: Final = frozenset(
    {"/tokenize", "/detokenize", "/pooling", "/score", "/rerank", "/classify", "/invocations"}
)
# A newline, too: whoever has no key is told so whatever the path.
_ANY_PATH: Final = r"{path:[\s\S]*}"
# Of a name or a path in an error.
_NAME_MAX: Final = 200
_LATER: Final = {"retry-after": "2"}
_OUTCOMES: Final = ("sent on", "no key", "no model", "refused")


class Answers:
    """Answer over the unix socket that Envoy asks."""

    def __init__(
        self,
        directory: Callable[[], Directory],
        keys: KeyFile | None,
        bounds: Bounds,
        registry: CollectorRegistry,
        wake: Callable[[str], Awaitable[bool]] | None = None,
    ) -> None:
        """`keys`: without, everybody is served. `wake(cluster)`: return whether it answers, after it was
        started if it is asleep; without, none is."""
        self._wake = wake
        self._directory = directory
        self._keys = keys
        self._bounds = bounds
        # Of the bodies that are read now.
        self._body_bytes = 0
        self.draining = False
        self._requests = Counter(
            "tailrace_edge_requests",
            "Requests of users, by what became of them.",
            ["outcome"],
            registry=registry,
        )
        for outcome in _OUTCOMES:
            self._requests.labels(outcome)

    def app(self) -> web.Application:
        """Return the server's application."""
        # Envoy bounds what comes.
        app = web.Application(client_max_size=1 << 31, middlewares=[_as_openai])
        for prefix, handler in ((KEY_CHECK, self._check_key), (MODEL_CHOICE, self._choose_model)):
            app.router.add_route("*", prefix + _ANY_PATH, handler)
        for path in OWN_PATHS:
            app.router.add_get(path, self._models if path == "/v1/models" else self._ready)
        return app

    async def _check_key(self, request: web.Request) -> web.Response:
        if self._owner(request) is not None:
            return web.Response()
        self._requests.labels("no key").inc()
        challenge = {"www-authenticate": "Bearer"}
        return _error(HTTPStatus.UNAUTHORIZED, "AuthenticationError", KEY_REQUIRED, challenge)

    async def _choose_model(self, request: web.Request) -> web.Response:
        path = request.match_info["path"]
        if not path.startswith(_ROUTES) and path not in _OTHER_ROUTES:
            self._requests.labels("refused").inc()
            message = f"{request.method} {printable(path[:_NAME_MAX])} is not served here."
            return _error(HTTPStatus.NOT_FOUND, "NotFoundError", message)
        size = request.content_length or 0
        if size >= self._bounds.max_body_bytes:
            self._requests.labels("refused").inc()
            # It may be cut. Envoy says which limit it is (configuration.py).
            return web.Response(status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        if self._body_bytes + size > self._bounds.max_bodies_bytes:
            self._requests.labels("refused").inc()
            message = "Too many large requests at a time: try again."
            return _error(HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError", message, _LATER)
        self._body_bytes += size
        try:
            return await self._choose(request, path)
        finally:
            self._body_bytes -= size

    async def _choose(self, request: web.Request, path: str) -> web.Response:
        body = await request.read()
        is_form = _is_form(request)
        try:
            asked = await asyncio.to_thread(_asked, body) if len(body) > _LARGE_BYTES else _asked(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            # A form has its model in a field of its own; with one model there is nothing to choose.
            asked = Asked(model=request.query.get("model"))
            if not is_form and self._directory().find(None) is None:
                self._requests.labels("refused").inc()
                return _error(HTTPStatus.BAD_REQUEST, "BadRequestError", f"The body: {shown(str(error))}")
        asked.model = asked.model or request.query.get("model")
        directory = self._directory()
        served = directory.find(asked.model)
        tenant = self._owner(request)
        # Front ends with vLLM's Rust API server know no tenants. The field of a form, and the answer that a
        # request without a body resumes, only the front end knows.
        names_model = asked.model or (body and not is_form)
        if served is not None and tenant is not None and names_model and not _may_use(tenant, served.name):
            self._requests.labels("refused").inc()
            message = f"This key may use {', '.join(tenant.models)}, not {shown(served.name)}."
            return _error(HTTPStatus.FORBIDDEN, "PermissionDeniedError", message, param="model")
        if request.method == "OPTIONS":
            # About all models alike.
            served = served or next(iter(directory.names.values()), None)
        if served is None:
            self._requests.labels("no model").inc()
            return self._unknown(asked.model)
        cluster = served.cluster(path, asked)
        if request.method == "OPTIONS" and served.rust:
            # Any of them answers it: none is started for it.
            cluster = served.rust
        if self._wake is not None and not await self._wake(cluster):
            self._requests.labels("refused").inc()
            message = "The API server that can answer this is being started: try again."
            return _error(HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError", message, _LATER)
        self._requests.labels("sent on").inc()
        return web.Response(headers={CLUSTER: cluster})

    def _unknown(self, model: str | None) -> web.Response:
        directory = self._directory()
        if model in directory.gone or not directory.names:
            what = f"of the model `{printable(model[:_NAME_MAX])}`" if model else "of any model"
            message = f"No front end {what} is there at the moment: try again."
            return _error(HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError", message, _LATER)
        if model:
            # As vLLM says it.
            message = f"The model `{printable(model[:_NAME_MAX])}` does not exist."
            return _error(HTTPStatus.NOT_FOUND, "NotFoundError", message, param="model")
        message = "Several models are served here: name one in the field model (of a form: ?model=NAME)."
        return _error(HTTPStatus.BAD_REQUEST, "BadRequestError", message, param="model")

    async def _models(self, request: web.Request) -> web.Response:
        tenant = self._owner(request)
        if self._keys is not None and tenant is None:
            return await self._check_key(request)
        names = self._directory().names.values()
        allowed = [each for each in names if tenant is None or _may_use(tenant, each.name)]
        return web.json_response({"object": "list", "data": [_model(each) for each in allowed]})

    async def _ready(self, request: web.Request) -> web.Response:
        if request.path != "/ready":
            return web.Response()
        if self.draining:
            return _error(HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError", "This edge is stopping.")
        if not self._directory().names:
            return self._unknown(None)
        return web.Response()

    def _owner(self, request: web.Request) -> Tenant | None:
        if self._keys is None:
            return None
        authorization = request.headers.get("authorization", "")
        # Keys are ASCII; bytes that are no text could not be compared.
        return self._keys.index().bearer(authorization) if authorization.isascii() else None


@web.middleware
async def _as_openai(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer as OpenAI does what aiohttp itself refuses, such as a method."""
    try:
        return await handler(request)
    except web.HTTPClientError as error:
        headers = {"allow": error.headers["allow"]} if "allow" in error.headers else {}
        return _error(HTTPStatus(error.status), "BadRequestError", error.reason, headers)


def _may_use(tenant: Tenant, name: str) -> bool:
    return not tenant.models or name in tenant.models


def _asked(body: bytes) -> Asked:
    return msgspec.json.decode(body, type=Asked) if body else Asked()


def _is_form(request: web.Request) -> bool:
    return request.content_type.startswith(("multipart/", "application/x-www-form-urlencoded"))


def _model(served: Served) -> dict[str, object]:
    parent = None if served.name == served.model else served.model
    return {
        "id": served.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "vllm",
        "root": served.root,
        "parent": parent,
    }


def _error(
    status: HTTPStatus,
    kind: str,
    message: str,
    headers: Mapping[str, str] | None = None,
    param: str | None = None,
) -> web.Response:
    body = error_body(status, kind, message, param)
    return web.Response(status=status, headers=headers, body=body, content_type="application/json")
