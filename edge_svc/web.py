"""What the edge answers: Envoy's two questions about each request, and the paths that no model has."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, Counter

from edge_svc.configuration import (
    CLUSTER,
    KEY_CHECK,
    LENGTH,
    MODEL_CHOICE,
    OWN_PATHS,
    TICKET,
    UNAVAILABLE,
    Bounds,
)
from edge_svc.directory import GENERATING, RUST_PATHS, STATE, TOKENIZING, Asked, Directory, Served
from edge_svc.limits import Limits, Open
from edge_svc.usage import Usage
from tailrace.bounded import printable, shown
from tailrace.request_ids import name_at_edge, problem_with
from tailrace.service.openai_error import error_body
from tailrace.tenancy.body import (
    LARGE_BODY_BYTES,
    LimitRefusal,
    is_form,
    judge,
    max_text_bytes_of,
    too_many_sequences,
)
from tailrace.tenancy.demand import Demand
from tailrace.tenancy.file import KeyFile
from tailrace.tenancy.keys import KEY_REQUIRED, Holder, Tenant
from tailrace.wire.requests import OURS, pace_in

log = logging.getLogger(__name__)

# How the name of one of Tailrace's arguments in vllm_xargs begins, and the longest text that has one.
_OUR_ARGUMENT: Final = f'"{OURS}'.encode()
_ARGUMENTS_MAX_BYTES: Final = 16_384
# Paths of API servers that are for users.
_ROUTES: Final = ("/v1/", "/v2/")
_OTHER_ROUTES: Final = TOKENIZING | STATE | {"/pooling", "/score", "/rerank", "/classify", "/invocations"}
# Of the other methods no body is read.
_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})
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
        limits: Limits | None = None,
        usage: Usage | None = None,
    ) -> None:
        """`keys`: without, everybody is served. `wake(cluster)`: return whether it answers, after it was
        started if it is asleep; without, none is. `usage`: None if no front end is heard."""
        self._wake = wake
        self._directory = directory
        self._keys = keys
        self._bounds = bounds
        self._limits = Limits(bounds, keys is not None) if limits is None else limits
        self._usage = usage
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
            app.router.add_route("*", prefix + _ANY_PATH, _to_envoy(handler))
        for path in OWN_PATHS:
            app.router.add_get(path, self._models if path == "/v1/models" else self._ready)
        return app

    async def _check_key(self, request: web.Request) -> web.Response:
        if (holder := self._holder(request)) is not None:
            try:
                length = request.headers.get(LENGTH, "")
                if length.isascii() and length.isdigit():
                    announced = int(length[:18])
                else:
                    # In chunks: it may become as large as any.
                    announced = self._bounds.unknown_body_bytes if request.method in _WITH_BODY else 0
                if announced >= self._bounds.max_body_bytes:
                    return self._too_large()
                await self._limits.check(self._open(request, holder), announced)
            except LimitRefusal as refused:
                return self._refused(refused)
            return web.Response()
        return self._no_key()

    def _no_key(self) -> web.Response:
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
            # It may be cut.
            return self._too_large()
        holder = self._holder(request)
        if self._keys is not None and holder is None and request.method != "OPTIONS":
            # It was revoked while the body came.
            return self._no_key()
        opened = self._open(request, holder)
        try:
            await self._limits.hold(opened, size)
            return await self._choose(request, path, opened, holder)
        except LimitRefusal as refused:
            return self._refused(refused)
        finally:
            opened.body.close()

    async def _choose(
        self, request: web.Request, path: str, opened: Open, holder: Holder | None
    ) -> web.Response:
        """Return the answer that names the cluster. Raise LimitRefusal."""
        body = await request.read()
        from_form = is_form(request.content_type)
        try:
            asked = await _apart(body, lambda: _asked(body))
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            # A form has its model in a field of its own; with one model there is nothing to choose.
            asked = Asked(model=request.query.get("model"))
            if not from_form and self._directory().find(None) is None:
                self._requests.labels("refused").inc()
                return _error(HTTPStatus.BAD_REQUEST, "BadRequestError", f"The body: {shown(str(error))}")
        asked.model = asked.model or request.query.get("model")
        directory = self._directory()
        served = directory.find(asked.model)
        tenant = None if holder is None else holder.tenant
        # The field of a form, and the answer that a request without a body resumes, only the front end knows.
        names_model = asked.model or (body and not from_form)
        if served is not None and tenant is not None and names_model and not tenant.may_use(served.name):
            self._requests.labels("refused").inc()
            message = f"This key may use {', '.join(tenant.models)}, not {shown(served.name)}."
            return _error(HTTPStatus.FORBIDDEN, "PermissionDeniedError", message, param="model")
        if request.method == "OPTIONS":
            # About all models alike.
            served = served or next(iter(directory.names.values()), None)
        if served is None:
            self._requests.labels("no model").inc()
            return self._unknown(asked.model)
        cluster = await _apart(body, partial(served.cluster, path, asked))
        headers: dict[str, str] = {}
        if request.method == "OPTIONS":
            # Any of them answers it: none is started for it.
            cluster = served.rust or cluster
        elif cluster == served.rust:
            cluster, headers = await self._to_rust(request, path, body, asked, served, opened, holder)
        if self._wake is not None and not await self._wake(cluster):
            self._requests.labels("refused").inc()
            message = "The API server that can answer this is being started: try again."
            return _error(HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError", message, _LATER)
        self._requests.labels("sent on").inc()
        return web.Response(headers={CLUSTER: cluster, **headers})

    async def _to_rust(
        self,
        request: web.Request,
        path: str,
        body: bytes,
        asked: Asked,
        served: Served,
        opened: Open,
        holder: Holder | None,
    ) -> tuple[str, dict[str, str]]:
        """Return the cluster of a request that vllm-rs answers, which has no limits of its own and answers
        refusals with 500, and its headers. Raise LimitRefusal."""
        tenant = None if holder is None else holder.tenant
        if tenant is not None and (path not in RUST_PATHS or request.method != "POST"):
            raise LimitRefusal(
                HTTPStatus.NOT_FOUND, f"{request.method} {path[:_NAME_MAX]} is not served here."
            )
        _check_ids(request, asked)
        _check_arguments(bytes(asked.vllm_xargs))
        demand = Demand()
        if body and not is_form(request.content_type):
            bounds = self._bounds
            most = self._max_text_bytes(served.rust), bounds.max_messages, bounds.max_sequences
            demand = await _apart(body, lambda: judge(body, *most))
            if demand.sequences > bounds.max_sequences:
                raise too_many_sequences(bounds.max_sequences)
        if tenant is not None and (problem := _only_python_can(tenant, demand)):
            if not served.python:
                raise LimitRefusal(HTTPStatus.BAD_REQUEST, problem)
            return served.python, {}
        if self._usage is not None and path in GENERATING:
            self._usage.check(served.rust, "" if tenant is None else tenant.name)
        await self._limits.begin(opened, demand, path in TOKENIZING)
        if holder is None or self._keys is None:
            return served.rust, {}
        headers = {"x-request-id": name_at_edge(request.headers.get("x-request-id", ""), holder.key_id)}
        if edge_key := self._keys.index().edge_key:
            headers["authorization"] = f"Bearer {edge_key}"
        return served.rust, headers

    def _max_text_bytes(self, cluster: str) -> int:
        context = 0 if self._usage is None else self._usage.context_tokens(cluster)
        by_context = max_text_bytes_of(context) if context else self._bounds.max_body_bytes
        return self._bounds.max_text_bytes or by_context

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
        holder = self._holder(request)
        if self._keys is not None and holder is None:
            return self._no_key()
        tenant = None if holder is None else holder.tenant
        names = self._directory().names.values()
        allowed = [each for each in names if tenant is None or tenant.may_use(each.name)]
        return web.json_response({"object": "list", "data": [self._model(each) for each in allowed]})

    def _model(self, served: Served) -> dict[str, object]:
        context = 0 if self._usage is None else self._usage.context_tokens(served.rust)
        return _model(served) | ({"max_model_len": context} if context else {})

    async def _ready(self, request: web.Request) -> web.Response:
        if request.path != "/ready":
            return web.Response()
        if self.draining:
            return _error(HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError", "This edge is stopping.")
        if not self._directory().names:
            return self._unknown(None)
        if self._usage is not None and (unready := self._usage.unready()):
            status = HTTPStatus.SERVICE_UNAVAILABLE
            return _error(status, "ServiceUnavailableError", printable(unready), _LATER)
        return web.Response()

    def _open(self, request: web.Request, holder: Holder | None) -> Open:
        ticket = request.headers.get(TICKET, "")
        return self._limits.open(ticket, None if holder is None else holder.tenant)

    def _too_large(self) -> web.Response:
        return self._refused(LimitRefusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._bounds.too_large))

    def _refused(self, refused: LimitRefusal) -> web.Response:
        self._requests.labels("refused").inc()
        return _error(refused.status, refused.kind, printable(refused.message), refused.headers)

    def _holder(self, request: web.Request) -> Holder | None:
        if self._keys is None:
            return None
        authorization = request.headers.get("authorization", "")
        # Keys are ASCII; bytes that are no text could not be compared.
        return self._keys.index().bearer(authorization) if authorization.isascii() else None


def _to_envoy(handler: Handler) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            reply = await handler(request)
        except web.HTTPException:
            raise
        except Exception:  # a request that nobody foresaw fails alone
            log.exception("%s cannot be handled", printable(request.path[:_NAME_MAX]))
            message = "This request could not be handled; try again."
            reply = _error(HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError", message, _LATER)
        if reply.status == HTTPStatus.SERVICE_UNAVAILABLE:
            reply.set_status(UNAVAILABLE)
        return reply

    return answer


@web.middleware
async def _as_openai(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer as OpenAI does what aiohttp itself refuses, such as a method."""
    try:
        return await handler(request)
    except web.HTTPClientError as error:
        headers = {"allow": error.headers["allow"]} if "allow" in error.headers else {}
        return _error(HTTPStatus(error.status), "BadRequestError", error.reason, headers)


T = TypeVar("T")


async def _apart(body: bytes, read: Callable[[], T]) -> T:
    """Read a body, a large one in a thread. Raise what that raises."""
    return await asyncio.to_thread(read) if len(body) > LARGE_BODY_BYTES else read()


def _check_ids(request: web.Request, asked: Asked) -> None:
    """Check the ids that a client chose. Raise LimitRefusal."""
    chosen = [
        ("X-Request-Id", request.headers.get("x-request-id", "")),
        ("X-Session-Id", request.headers.get("x-session-id", "")),
    ]
    for name, raw in (("request_id", asked.request_id), ("session_id", asked.session_id)):
        if bytes(raw)[:1] == b'"':
            try:
                chosen.append((name, msgspec.json.decode(raw, type=str)))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                raise LimitRefusal(HTTPStatus.BAD_REQUEST, f"{name} is not valid text.") from None
    if problem := problem_with(chosen):
        raise LimitRefusal(HTTPStatus.BAD_REQUEST, problem)


def _check_arguments(vllm_xargs: bytes) -> None:
    """Check the arguments that are Tailrace's own, as front ends do. Raise LimitRefusal.

    Others are not decoded: they may be as long as a body, and this runs on the event loop.
    """
    if _OUR_ARGUMENT not in vllm_xargs:
        return
    if len(vllm_xargs) > _ARGUMENTS_MAX_BYTES:
        problem = f"vllm_xargs with an argument of Tailrace's has at most {_ARGUMENTS_MAX_BYTES:,} bytes."
        raise LimitRefusal(HTTPStatus.BAD_REQUEST, problem)
    try:
        problem = pace_in(msgspec.json.decode(vllm_xargs, type=dict[str, Any]))[1]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        problem = "vllm_xargs is not valid."
    if problem:
        raise LimitRefusal(HTTPStatus.BAD_REQUEST, problem)


def _only_python_can(tenant: Tenant, demand: Demand) -> str:
    """Return why a tenant's request cannot go to vllm-rs; empty if it can."""
    if demand.media:
        return "With API keys, vllm-rs takes no images or other media: they would have no salt."
    if tenant.longest_prompt:
        return "This key has a longest prompt, and vllm-rs cannot be asked for one's length before it begins."
    return ""


def _asked(body: bytes) -> Asked:
    return msgspec.json.decode(body, type=Asked) if body else Asked()


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
