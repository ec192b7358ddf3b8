"""Envoy's configuration: which requests it sends where. Pure.

Envoy is the proxy; what it cannot know it asks the edge over a unix socket (Envoy's `ext_authz` filter):
first, with the headers alone, whether the key is valid, then, with the body, which model's front ends are
meant. The answer's header CLUSTER names the cluster. The clusters and their endpoints are in files, which
Envoy follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from socket import IPPROTO_TCP
from types import MappingProxyType
from typing import Any, Final

from tailrace.address import MalformedAddress, format_address, is_ip, parse_address
from tailrace.numeric import Duration, WholeRange
from tailrace.security.roles import Role, server_name
from tailrace.service.openai_error import NO_WEB_SOCKETS, error_body
from tailrace.service.settings import setting
from tailrace.service.sockets import CLIENT_GIVE_UP_S

CLUSTER: Final = "x-tailrace-cluster"
"""Header of the edge's answers, and of nobody else's requests: Envoy replaces what a client sent."""
TICKET: Final = "x-tailrace-ticket"
"""Header by which the edge and the line about a request's end know it; Envoy replaces what a client sent."""
LENGTH: Final = "x-tailrace-length"
"""Header with the length of the body that the client announces, or `-`; Envoy replaces what a client sent."""
KEY_CHECK: Final = "/edge/key"
"""Prefix of the path of a question with the headers alone."""
MODEL_CHOICE: Final = "/edge/model"
"""Prefix of the path of a question with the body."""
UNAVAILABLE: Final = 471
"""Status of the edge's answer to a question, of which Envoy makes 503. An answer with 503 it takes for none,
and tells the client nothing of it."""
EDGE: Final = "edge"
"""The cluster of the edge itself."""
EDGE_CONNECTIONS: Final = 2_048
"""Most connections of Envoy to the edge, with a question at a time each."""
ENDED: Final = "ended"
"""Name of the pipe into which Envoy writes a line for each request that has ended."""
OWN_PATHS: Final = ("/v1/models", "/ready", "/health", "/ping")
"""What the edge answers."""

_TYPES: Final = "type.googleapis.com/envoy.extensions"
_FRONTEND: Final = server_name(Role.FRONTEND)
# Names of the edge's certificates, for front ends and for users, and of the authorities of front ends.
_OWN: Final = "own"
_USERS: Final = "users"
_TRUSTED: Final = "trusted"
# A client's time for its TLS handshake, and then for a request's header.
_OPENING: Final = "10s"
# Of endpoints that speak HTTPS.
_TLS: Final = {"tls": True}
# The edge answers within milliseconds, except when it reads a body of many megabytes.
_ASK_S: Final = 10.0
_CONNECT_S: Final = 5.0
# What the edge reads of a request; everything else stays in Envoy.
_ASKED_HEADERS: Final = ("authorization", "content-type", "x-request-id", "x-session-id", TICKET, LENGTH)
# What vllm-rs gets instead of the client's.
_CHANGED_HEADERS: Final = (CLUSTER, "authorization", "x-request-id")
_ANSWERED_HEADERS: Final = ("content-type", "retry-after", "www-authenticate")
# Envoy's own answers: no endpoint, no connection, too large, too slow, malformed.
_OWN_FLAGS: Final = (
    "UH",
    "UF",
    "UC",
    "UO",
    "UR",
    "LR",
    "NR",
    "NC",
    "UT",
    "URX",
    "DPE",
    "IH",
    "SI",
    "OM",
    "DT",
)
# Envoy stops reading at its buffer limit: above the largest body, or a larger one would wait instead of being
# refused.
_SLACK_BYTES: Final = 1 << 20
# What Envoy keeps of an answer, on each of its two connections, for a client that does not read it: then the
# API server, which ends such a stream, notices. In 16 KiB Envoy reads a token with the least work.
_ANSWER_BYTES: Final = 1 << 14
_HEADERS_MAX: Final = 100
# What Envoy and the edge add to a client's. A request with more than both Envoy refuses with 431, and one to
# which no more can be added with 500.
_ADDED_HEADERS: Final = 10
# Without headers that tell strangers about the fleet.
_ROUTER: Final = {"suppress_envoy_headers": True}
# When a client whose model has no front end at the moment may try again.
_RETRY_AFTER: Final = {
    "header": {"key": "retry-after", "value": "2"},
    "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
}
_METHODS: Final = "GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS|TRACE"
_UNKNOWN_METHOD: Final = error_body(
    HTTPStatus.METHOD_NOT_ALLOWED, "BadRequestError", "The method is not known here."
).decode()
_AS_JSON: Final = {
    "header": {"key": "content-type", "value": "application/json"},
    "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
}
_UNLIMITED: Final = 1 << 20
_OTHER_HOST: Final = {
    "name": "envoy.retry_host_predicates.previous_hosts",
    "typed_config": {"@type": f"{_TYPES}.retry.host.previous_hosts.v3.PreviousHostsPredicate"},
}
# One that hangs is noticed within six seconds.
_HEALTH_CHECK: Final = {
    "interval": "1s",
    "no_traffic_interval": "1s",
    "timeout": "2s",
    "unhealthy_threshold": 2,
    "healthy_threshold": 1,
    "http_health_check": {"path": "/health"},
}
# In seconds: it has vanished after two minutes. Streams outlast shorter outages of a network.
_KEEPALIVE: Final = {"keepalive_time": 60, "keepalive_interval": 10, "keepalive_probes": 6}
_HTTP_OPTIONS: Final = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
# A front end closes a connection that is idle for 75 s: one that Envoy uses just then would be reset.
_PROTOCOL: Final = {
    "@type": f"{_TYPES}.upstreams.http.v3.HttpProtocolOptions",
    "common_http_protocol_options": {"idle_timeout": "60s"},
    "explicit_http_config": {"http_protocol_options": {}},
}
# Beyond, clusters and endpoints of a file would be of no real fleet.
_MODELS_MAX: Final = 1_000


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a client may send."""

    max_body_bytes: int = setting(
        64 << 20, "Largest body of a request.", type=WholeRange(min=1 << 10, max=1 << 30), rare=True
    )
    max_bodies_bytes: int = setting(
        512 << 20,
        "Bodies that are read at a time, in all, half of them for one tenant; more are refused with 429.",
        type=WholeRange(min=1 << 20),
        rare=True,
    )
    # The next three are also the Python app's.
    max_text_bytes: int = setting(
        0,
        "Largest body for vllm-rs without its images and other media; 0: 16 bytes for each token of context, "
        "at least 1 MiB.",
        type=WholeRange(min=0),
        rare=True,
    )
    max_messages: int = setting(
        2_048,
        "Most messages, content parts and tools of a request for vllm-rs.",
        type=WholeRange(min=1),
        rare=True,
    )
    max_sequences: int = setting(
        2_048,
        "Most sequences of a request for vllm-rs: its prompts times n.",
        type=WholeRange(min=1),
        rare=True,
    )
    max_header_kib: int = setting(
        60, "Largest headers of a request, in KiB.", type=WholeRange(min=4, max=1024), rare=True
    )
    max_connections: int = setting(
        16_384, "Connections of clients at a time.", type=WholeRange(min=1), rare=True
    )
    max_heap_bytes: int = setting(
        2 << 30,
        "Memory of the proxy from which on it refuses requests with 503.",
        type=WholeRange(min=1 << 26),
        rare=True,
    )
    body_timeout_s: float = setting(
        120.0, "Time for a client to send a request.", "--body-timeout", type=Duration(min=1), rare=True
    )
    start_wait_s: float = setting(
        300.0,
        "Time for a request to wait for an API server that is started for it; then it gets 503.",
        "--start-wait",
        type=Duration(min=1, max=3_600),
        rare=True,
    )

    @property
    def unknown_body_bytes(self) -> int:
        """Return what counts for a body of unknown length while it arrives: of one tenant four may."""
        return min(self.max_body_bytes - 1, self.max_bodies_bytes // 8)

    @property
    def too_large(self) -> str:
        """Return the answer to a body beyond `max_body_bytes`."""
        return f"The body is larger than {self.max_body_bytes} bytes."


DEFAULT_BOUNDS: Final = Bounds()


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the front ends of a cluster listen, HOST:PORT each."""

    cluster: str
    addresses: Sequence[str]
    # Those of them that speak HTTPS.
    https: frozenset[str] = frozenset()
    # Whether their API servers start with the first connection: none may be for a health check.
    asleep: bool = False


def bootstrap(
    listen: str,
    folder: Path,
    bounds: Bounds,
    *,
    with_keys: bool,
    https: bool,
    tcp_options: Sequence[tuple[int, int]] = (),
) -> dict[str, Any]:
    """Return the static part.

    `folder`: has `edge.sock` and the pipe `ended` of the edge, `admin.sock` of Envoy, and `clusters.json`.
    `https`: whether there is the file of `users_secret`. `tcp_options`: of clients' connections, number and
    value each.
    """
    filters = [
        _ask("model", MODEL_CHOICE, bounds.max_body_bytes, bounds.start_wait_s + _ASK_S),
        _filter("router", "router.v3.Router", _ROUTER),
    ]
    if with_keys:
        # First, so that the body of a stranger is not even read.
        filters.insert(0, _ask("key", KEY_CHECK, 0, _ASK_S))
    filters.insert(0, _filter("ticket", "header_mutation.v3.HeaderMutation", _own_headers()))
    connections = {
        "@type": f"{_TYPES}.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
        "max_active_downstream_connections": bounds.max_connections,
    }
    heap = {
        "@type": f"{_TYPES}.resource_monitors.fixed_heap.v3.FixedHeapConfig",
        "max_heap_size_bytes": bounds.max_heap_bytes,
    }
    return {
        "node": {"id": "edge", "cluster": "tailrace"},
        "admin": {"address": _pipe(folder / "admin.sock")},
        "overload_manager": {
            "resource_monitors": [
                {
                    "name": "envoy.resource_monitors.global_downstream_max_connections",
                    "typed_config": connections,
                },
                {"name": "envoy.resource_monitors.fixed_heap", "typed_config": heap},
            ],
            "actions": [
                {
                    "name": "envoy.overload_actions.stop_accepting_requests",
                    "triggers": [
                        {"name": "envoy.resource_monitors.fixed_heap", "threshold": {"value": 0.95}}
                    ],
                }
            ],
        },
        "static_resources": {
            "listeners": [_listener(listen, folder, bounds, filters, https, tcp_options)],
            "clusters": [_edge(folder / "edge.sock")],
        },
        "dynamic_resources": {"cds_config": _file(folder / "clusters.json")},
    }


def clusters(every: Sequence[Endpoints], folder: Path, *, tls: bool) -> dict[str, Any]:
    """Return `clusters.json`. What changes is in the files of `endpoints`, so that streams go on.

    `tls`: whether there are the files of `secrets`.
    """
    return {"resources": [_cluster(each.cluster, folder, tls) for each in every[:_MODELS_MAX]]}


def endpoints(each: Endpoints, ips: Mapping[str, Sequence[str]] = MappingProxyType({})) -> dict[str, Any]:
    """Return the file of a cluster's endpoints. `ips`: of host names; an address that has none is left out,
    since Envoy would refuse the whole file."""
    unchecked = {"health_check_config": {"disable_active_health_check": True}} if each.asleep else {}
    over_tls: dict[str, Any] = {"metadata": {"filter_metadata": {"envoy.transport_socket_match": _TLS}}}
    lb: list[dict[str, Any]] = [
        {"endpoint": found | unchecked} | (over_tls if address in each.https else {})
        for address in each.addresses
        if (found := _endpoint(address, ips))
    ]
    return {
        "resources": [
            {
                "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
                "cluster_name": each.cluster,
                "endpoints": [{"lb_endpoints": lb}],
            }
        ]
    }


def host_of(address: str) -> str:
    """Return the host of HOST:PORT; empty if it is none."""
    try:
        return parse_address(address)[0]
    except MalformedAddress:
        return ""


def is_literal(host: str) -> bool:
    """Return whether this is an IP address, without a zone, which means something on one machine only."""
    return is_ip(host) and "%" not in host


def endpoints_file(cluster: str, folder: Path) -> Path:
    """Return the name of the file of a cluster's endpoints."""
    return folder / f"{cluster}.json"


def secrets(certificate: str, key: str, authorities: str) -> dict[str, dict[str, Any]]:
    """Return the files, by their names, of the edge's certificate and of what a front end has to show: one of
    that role, wherever it listens."""
    name = {"san_type": "DNS", "matcher": {"exact": _FRONTEND}}
    trusted = {"trusted_ca": {"inline_string": authorities}, "match_typed_subject_alt_names": [name]}
    return _certificate_file(_OWN, certificate, key) | _secret_file(_TRUSTED, {"validation_context": trusted})


def users_secret(chain: str, key: str) -> dict[str, dict[str, Any]]:
    """Return the file, by its name, of the certificate that users see."""
    return _certificate_file(_USERS, chain, key)


def _certificate_file(name: str, chain: str, key: str) -> dict[str, dict[str, Any]]:
    both = {"certificate_chain": {"inline_string": chain}, "private_key": {"inline_string": key}}
    return _secret_file(name, {"tls_certificate": both})


def _secret_file(name: str, content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    secret = {"@type": f"{_TYPES}.transport_sockets.tls.v3.Secret", "name": name, **content}
    return {f"{name}.json": {"resources": [secret]}}


def _secret(folder: Path, name: str) -> dict[str, Any]:
    return {"name": name, "sds_config": _file(folder / f"{name}.json")}


def _listener(
    listen: str,
    folder: Path,
    bounds: Bounds,
    filters: Sequence[Any],
    https: bool,
    tcp_options: Sequence[tuple[int, int]],
) -> dict[str, Any]:
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "users",
        "use_remote_address": True,
        # A client's own id is vLLM's, and Envoy's would look like one.
        "generate_request_id": False,
        "preserve_external_request_id": True,
        "server_header_transformation": "PASS_THROUGH",
        "normalize_path": True,
        "path_with_escaped_slashes_action": "REJECT_REQUEST",
        "max_request_headers_kb": bounds.max_header_kib,
        "request_headers_timeout": _OPENING,
        "request_timeout": _seconds(bounds.body_timeout_s),
        # A stream may wait long for its first token.
        "stream_idle_timeout": "0s",
        # Of a whole answer, kept for an HTTP/2 client that reads others, not this. One that is not whole yet
        # is the API server's, which ends it after the same time.
        "stream_flush_timeout": _seconds(CLIENT_GIVE_UP_S),
        "common_http_protocol_options": {
            "idle_timeout": "300s",
            "max_headers_count": _HEADERS_MAX + _ADDED_HEADERS,
        },
        # What some proxies and probes speak by default; it may come without a host.
        "http_protocol_options": {"accept_http_10": True, "default_host_for_http_10": "localhost"},
        "http2_protocol_options": {
            "max_concurrent_streams": 1_000,
            "initial_stream_window_size": 1 << 18,
            "initial_connection_window_size": 1 << 24,
        },
        "local_reply_config": _own_answers(bounds),
        "route_config": {
            "name": "users",
            "virtual_hosts": [
                {
                    "name": "users",
                    "domains": ["*"],
                    "routes": _routes(),
                    "request_body_buffer_limit": bounds.max_body_bytes + _SLACK_BYTES,
                }
            ],
        },
        "http_filters": filters,
        "access_log": [_ended(folder / ENDED)],
    }
    chain: dict[str, Any] = {
        "filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    }
    if https:
        tls = {
            "@type": f"{_TYPES}.transport_sockets.tls.v3.DownstreamTlsContext",
            "common_tls_context": {
                "tls_certificate_sds_secret_configs": [_secret(folder, _USERS)],
                "alpn_protocols": ["h2", "http/1.1"],
            },
        }
        chain["transport_socket"] = {"name": "envoy.transport_sockets.tls", "typed_config": tls}
        chain["transport_socket_connect_timeout"] = _OPENING
    return {
        "name": "users",
        "address": _address(listen),
        "per_connection_buffer_limit_bytes": _ANSWER_BYTES,
        "socket_options": [
            {"level": IPPROTO_TCP, "name": name, "int_value": value, "state": "STATE_PREBIND"}
            for name, value in tcp_options
        ],
        "filter_chains": [chain],
    }


def _endpoint(address: str, ips: Mapping[str, Sequence[str]]) -> dict[str, Any] | None:
    host = host_of(address)
    hosts = [host] if is_literal(host) else ips.get(host, ())
    if not hosts:
        return None
    _, port = parse_address(address)
    # Envoy tries the others if the first one does not take the connection.
    first, *others = ({"address": _address(format_address(each, port))} for each in hosts)
    return {**first, "additional_addresses": others}


def _routes() -> list[dict[str, Any]]:
    own = [
        {
            "match": {"path": path},
            "route": {"cluster": EDGE, "timeout": _seconds(_ASK_S)},
            # The list of models takes a key.
            "typed_per_filter_config": _unasked("model")
            if path == "/v1/models"
            else _unasked("key", "model"),
        }
        for path in OWN_PATHS
    ]
    to_models = {
        "cluster_header": CLUSTER,
        "timeout": "0s",
        # Of a request that no front end has seen: it was restarted a moment ago, or its host is gone.
        "retry_policy": {
            "retry_on": "connect-failure,refused-stream",
            "num_retries": 2,
            "retry_host_predicate": [_OTHER_HOST],
            "host_selection_retry_max_attempts": 3,
        },
    }
    # With HTTP/2 it may be any text, which the edge's own server cannot read.
    is_unknown = {
        "name": ":method",
        "string_match": {"safe_regex": {"regex": _METHODS}},
        "invert_match": True,
    }
    unknown = {
        "match": {"prefix": "/", "headers": [is_unknown]},
        "direct_response": {"status": 405, "body": {"inline_string": _UNKNOWN_METHOD}},
        "response_headers_to_add": [_AS_JSON],
        "typed_per_filter_config": _unasked("key", "model"),
    }
    to_models_route = {"route": to_models, "request_headers_to_remove": [CLUSTER]}
    # A browser asks without a key whether a page may send one. No body is read for that.
    is_preflight = {"name": ":method", "string_match": {"exact": "OPTIONS"}}
    bodiless = {
        "@type": f"{_TYPES}.filters.http.ext_authz.v3.ExtAuthzPerRoute",
        "check_settings": {"disable_request_body_buffering": True},
    }
    # Of bodies that nobody asks for, no more than of an answer: nothing counts them.
    uncounted = {"request_body_buffer_limit": _ANSWER_BYTES}
    preflight = {
        "match": {"prefix": "/", "headers": [is_preflight]},
        **uncounted,
        "typed_per_filter_config": {**_unasked("key"), "envoy.filters.http.ext_authz.model": bodiless},
        **to_models_route,
    }
    without_body = {"name": ":method", "string_match": {"safe_regex": {"regex": "GET|HEAD|DELETE|TRACE"}}}
    unread = {
        "match": {"prefix": "/", "headers": [without_body]},
        **uncounted,
        "typed_per_filter_config": {"envoy.filters.http.ext_authz.model": bodiless},
        **to_models_route,
    }
    return [unknown, *own, preflight, unread, {"match": {"prefix": "/"}, **to_models_route}]


def _unasked(*names: str) -> dict[str, Any]:
    return {
        f"envoy.filters.http.ext_authz.{name}": {
            "@type": f"{_TYPES}.filters.http.ext_authz.v3.ExtAuthzPerRoute",
            "disabled": True,
        }
        for name in names
    }


def _ask(name: str, prefix: str, body_bytes: int, timeout_s: float) -> dict[str, Any]:
    service = {
        "server_uri": {"uri": "http://edge", "cluster": EDGE, "timeout": _seconds(timeout_s)},
        "path_prefix": prefix,
        "authorization_response": {
            "allowed_upstream_headers": _names(_CHANGED_HEADERS),
            "allowed_client_headers": _names(_ANSWERED_HEADERS),
        },
    }
    config: dict[str, Any] = {
        "http_service": service,
        "allowed_headers": _names(_ASKED_HEADERS),
        "clear_route_cache": True,
        "status_on_error": {"code": "ServiceUnavailable"},
    }
    if body_bytes:
        config["with_request_body"] = {"max_request_bytes": body_bytes, "allow_partial_message": False}
    return _filter(f"ext_authz.{name}", "ext_authz.v3.ExtAuthz", config)


def _own_headers() -> dict[str, Any]:
    headers = ({"key": TICKET, "value": "%UNIQUE_ID%"}, {"key": LENGTH, "value": "%REQ(CONTENT-LENGTH)%"})
    return {
        "mutations": {
            "request_mutations": [
                {"append": {"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}}
                for header in headers
            ]
        }
    }


def _ended(pipe: Path) -> dict[str, Any]:
    line = {"text_format_source": {"inline_string": f"%REQ({TICKET})% %RESPONSE_CODE%\n"}}
    return {
        "name": "envoy.access_loggers.file",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog",
            "path": str(pipe),
            "log_format": line,
        },
    }


def _filter(name: str, kind: str, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    typed = {"@type": f"{_TYPES}.filters.http.{kind}", **(config or {})}
    return {"name": f"envoy.filters.http.{name}", "typed_config": typed}


def _own_answers(bounds: Bounds) -> dict[str, Any]:
    """Return how Envoy's own answers look: as OpenAI's errors, which name the limit."""
    texts = {
        # Envoy's own reason for it.
        403: NO_WEB_SOCKETS,
        408: f"The request did not arrive within {bounds.body_timeout_s:g} seconds.",
        413: bounds.too_large,
        431: f"The headers are larger than {bounds.max_header_kib} KiB, or more than {_HEADERS_MAX}.",
    }
    # What the edge has said stays. It never says 500: Envoy does, where headers do not fit.
    mappers: list[dict[str, Any]] = [
        {"filter": _is_status(UNAVAILABLE), "status_code": 503},
        {"filter": _is_status(500), "status_code": 431, "body_format_override": _error(texts[431])},
        {"filter": {"response_flag_filter": {"flags": ["UAEX"]}}},
    ]
    for status, text in texts.items():
        mappers.append({"filter": _is_status(status), "body_format_override": _error(text)})
    is_own = {"response_flag_filter": {"flags": list(_OWN_FLAGS)}}
    own = {
        "filter": is_own,
        "body_format_override": _error("%LOCAL_REPLY_BODY%"),
        "headers_to_add": [_RETRY_AFTER],
    }
    return {"mappers": [*mappers, own]}


def _is_status(status: int) -> dict[str, Any]:
    value = {"default_value": status, "runtime_key": f"tailrace.{status}"}
    return {"status_code_filter": {"comparison": {"op": "EQ", "value": value}}}


def _error(message: str) -> dict[str, Any]:
    error = {"message": message, "type": "APIError", "param": None, "code": "%RESPONSE_CODE%"}
    return {"json_format": {"error": error}}


def _edge(socket: Path) -> dict[str, Any]:
    return {
        "name": EDGE,
        "type": "STATIC",
        "connect_timeout": _seconds(_CONNECT_S),
        # It answers one after the other: more connections than its socket's backlog would be refused.
        "circuit_breakers": _limits(max_connections=EDGE_CONNECTIONS),
        "load_assignment": {
            "cluster_name": EDGE,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _pipe(socket)}}]}],
        },
    }


def _cluster(name: str, folder: Path, tls: bool) -> dict[str, Any]:
    sockets = {"transport_socket_matches": [_to_front_ends(folder)]} if tls else {}
    return {
        "@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster",
        "name": name,
        "type": "EDS",
        "eds_cluster_config": {"eds_config": _file(endpoints_file(name, folder))},
        "connect_timeout": _seconds(_CONNECT_S),
        "lb_policy": "LEAST_REQUEST",
        "per_connection_buffer_limit_bytes": _ANSWER_BYTES,
        # Of those that etcd lists, one that hangs gets no new requests; what it has goes on when it does.
        "health_checks": [_HEALTH_CHECK],
        # All alike, when none of them answers in time: they may only be busy.
        "common_lb_config": {"healthy_panic_threshold": {"value": 1}},
        # One that etcd no longer lists is stopping, though it still answers.
        "ignore_health_on_host_removal": True,
        # A stream whose host has vanished ends.
        "upstream_connection_options": {"tcp_keepalive": _KEEPALIVE},
        "typed_extension_protocol_options": {_HTTP_OPTIONS: _PROTOCOL},
        # As many as front ends take: they say what is too much.
        "circuit_breakers": _limits(max_connections=_UNLIMITED),
        **sockets,
    }


def _to_front_ends(folder: Path) -> dict[str, Any]:
    """Return how to connect to those that speak HTTPS: both ends show certificates of this cluster."""
    context = {
        "@type": f"{_TYPES}.transport_sockets.tls.v3.UpstreamTlsContext",
        "sni": _FRONTEND,
        "common_tls_context": {
            # As a client, Envoy offers 1.2 at most if nothing is said.
            "tls_params": dict.fromkeys(
                ("tls_minimum_protocol_version", "tls_maximum_protocol_version"), "TLSv1_3"
            ),
            "tls_certificate_sds_secret_configs": [_secret(folder, _OWN)],
            "validation_context_sds_secret_config": _secret(folder, _TRUSTED),
        },
    }
    socket = {"name": "envoy.transport_sockets.tls", "typed_config": context}
    return {"name": "tls", "match": _TLS, "transport_socket": socket}


def _limits(max_connections: int) -> dict[str, Any]:
    limits = {"max_connections": max_connections, "max_pending_requests": _UNLIMITED}
    # All that waited for a connection to the same front end are tried elsewhere at once.
    return {"thresholds": [{**limits, "max_requests": _UNLIMITED, "max_retries": _UNLIMITED}]}


def _file(path: Path) -> dict[str, Any]:
    return {"path_config_source": {"path": str(path)}, "resource_api_version": "V3"}


def _names(names: Sequence[str]) -> dict[str, Any]:
    return {"patterns": [{"exact": name, "ignore_case": True} for name in names]}


def _pipe(path: Path) -> dict[str, Any]:
    return {"pipe": {"path": str(path), "mode": 0o600}}


def _address(address: str) -> dict[str, Any]:
    host, port = parse_address(address)
    return {"socket_address": {"address": host, "port_value": port}}


def _seconds(seconds: float) -> str:
    return f"{seconds:g}s"
