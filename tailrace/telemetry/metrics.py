"""Prometheus metrics over HTTP, or over HTTPS for clients with a certificate.

Names: `tailrace_<service>_<thing>_<unit>`, in base units (seconds, bytes, tokens), counters ending in
`_total` (which prometheus_client appends itself). Labels have few values: phases, pools, causes, outcomes;
never request ids. The scrape target identifies the instance of a service, so metrics do not carry its id.

Metrics are collected in the event loop of the caller of `serve_metrics`, so that a collector may read the
service's plain counters and tables without locks.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Final, Self

from prometheus_client import CollectorRegistry, Gauge, GCCollector, Info, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tailrace.address import format_address
from tailrace.security.access import METRICS
from tailrace.security.credentials import uris_of
from tailrace.security.roles import NoIdentity, identity_of
from tailrace.security.transport import PLAIN, TlsTransport, Transport
from tailrace.service.sockets import ListenError, listen_reason
from tailrace.service.tasks import cancel, supervise
from tailrace.telemetry.incidents import LOOP_FAILURES, UNREADABLE, UNREADABLE_NOW, guarded, loop_named
from tailrace.telemetry.tracing import package_version

Page = tuple[HTTPStatus, str, bytes]
"""A reply: status, content type and body."""

_LOG: Final = logging.getLogger(__name__)
_REQUEST_TIMEOUT_S: Final = 5.0
_BACKLOG: Final = 16
_HEAD_LINES: Final = 64
_OF_MODEL: Final = ("tailrace_frontend_", "tailrace_worker_")
_FORBIDDEN: Final[Page] = (
    HTTPStatus.FORBIDDEN,
    "text/plain",
    b"a telemetry, viewer or admin certificate is needed\n",
)


def new_registry(service: str, instance: str) -> ServiceRegistry:
    """Create a registry with the process's own metrics (CPU, memory, files) and `tailrace_build_info`."""
    registry = ServiceRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    build = Info("tailrace_build", "What runs here.", registry=registry)
    build.info({"service": service, "id": instance, "version": package_version()})
    tasks = Gauge("tailrace_process_tasks", "Tasks of the event loop that have not ended.", registry=registry)
    # Called in the event loop; see the module.
    tasks.set_function(lambda: float(len(asyncio.all_tasks())))
    registry.register(LOOP_FAILURES)
    registry.register(UNREADABLE)
    registry.register(UNREADABLE_NOW)
    return registry


def counter_by(name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
    """Return a counter with a series for each value of one label."""
    return _by(CounterMetricFamily(name, text, labels=[label]), counts)


def gauge_by(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a gauge with a series for each value of one label."""
    return _by(GaugeMetricFamily(name, text, labels=[label]), values)


def _by(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]) -> Metric:
    for label, value in values.items():
        family.add_metric([label], value)
    return family


_SCRAPE: Final = loop_named("metrics")


class ServiceRegistry(CollectorRegistry):
    """A registry whose scrapes leave out what cannot be collected now, and count it as a loop's failure; it
    labels the series of what serves one model, a front end or a worker, with it."""

    model = ""
    """Set once it is known; until then the series have no such label."""

    def register(self, collector: Collector) -> None:
        """See CollectorRegistry."""
        super().register(_Guarded(collector))

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        for metric in super().collect():
            if self.model and metric.name.startswith(_OF_MODEL):
                metric.samples = [
                    s._replace(labels={**s.labels, "model": self.model}) for s in metric.samples
                ]
            yield metric


class _Guarded(Collector):
    """A collector that never raises."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        if (describe := getattr(collector, "describe", None)) is not None:
            self.describe = describe

    def collect(self) -> Iterable[Metric]:
        metrics: list[Metric] = []
        with guarded(_SCRAPE, type(self._collector).__name__):
            metrics.extend(self._collector.collect())
        return metrics


class MetricsServer:
    """Serve a registry over HTTP in the running event loop, at any path that has no page of its own."""

    def __init__(
        self,
        listener: socket.socket,
        registry: CollectorRegistry,
        transport: Transport,
        pages: Mapping[str, Callable[[], Page]],
    ) -> None:
        host, port = listener.getsockname()[:2]
        self.address = format_address(host, port)
        self._registry = registry
        self._transport = transport
        self._pages = pages
        self._listener = listener
        self._serving = supervise("metrics server", self._serve)

    async def close(self) -> None:
        """Stop listening. Scrapes in progress are aborted."""
        await cancel(self._serving)
        self._listener.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _serve(self) -> None:
        # A server closes its socket when it ends; clients of the next one wait at the listener meanwhile.
        listener = self._listener.dup()
        try:
            server = await asyncio.start_server(
                self._answer,
                sock=listener,
                limit=8192,
                ssl=_renewing_context(self._transport),
                ssl_handshake_timeout=_REQUEST_TIMEOUT_S if self._transport.encrypted else None,
            )
        except BaseException:
            listener.close()
            raise
        async with server:
            await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                method, path, accept = await _read_head(reader)
                reply = self._reply(method, path, accept) if _may_read(writer) else _http(*_FORBIDDEN)
                writer.write(reply)
                await writer.drain()
        except (TimeoutError, OSError, ValueError, asyncio.IncompleteReadError) as error:
            _LOG.debug("scrape failed: %s", error)
        finally:
            writer.close()

    def _reply(self, method: str, path: str, accept: str) -> bytes:
        if method not in ("GET", "HEAD"):
            return _http(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"")
        page = self._pages.get(path)
        if page is not None:
            status, content_type, body = page()
        else:
            encode, content_type = choose_encoder(accept)
            status, body = HTTPStatus.OK, encode(self._registry)
        reply = _http(status, content_type, body)
        return reply[: len(reply) - len(body)] if method == "HEAD" else reply


def _renewing_context(transport: Transport) -> ssl.SSLContext | None:
    """Return a context that always uses the transport's current certificate; None without TLS."""
    context = transport.https()
    if context is None:
        return None

    def take_current(tls: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        current = transport.https()
        if current is not None:
            tls.context = current

    # A separate context, since the callback must not be set on one that is in use elsewhere.
    renewing = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    renewing.minimum_version = ssl.TLSVersion.TLSv1_3
    renewing.verify_mode = ssl.CERT_REQUIRED
    renewing.num_tickets = 0
    renewing.sni_callback = take_current
    return renewing


def _register_expiry(registry: CollectorRegistry, transport: TlsTransport) -> None:
    expiry = Gauge(
        "tailrace_certificate_expiry_timestamp_seconds",
        "When this process's certificate ends, in seconds since the Unix epoch.",
        registry=registry,
    )
    expiry.set_function(lambda: transport.folder.current().end_s)


def _may_read(writer: asyncio.StreamWriter) -> bool:
    """Return whether the client may read metrics; without TLS, any client may."""
    certificate = writer.get_extra_info("peercert")
    if writer.get_extra_info("sslcontext") is None:
        return True
    try:
        return identity_of(uris_of(certificate or {})).role in METRICS
    except NoIdentity:
        return False


def serve_metrics(
    address: str,
    registry: CollectorRegistry,
    transport: Transport = PLAIN,
    pages: Mapping[str, Callable[[], Page]] = MappingProxyType({}),
) -> MetricsServer:
    """Serve the registry on HOST:PORT (--metrics; port 0: any free one, see `.address`).

    `pages`: what else is served, by path. Call it in a running event loop. Raise ListenError if the address
    cannot be bound, ValueError if it is malformed.
    """
    if isinstance(transport, TlsTransport):
        _register_expiry(registry, transport)
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(f"not HOST:PORT: {address!r}")
    host = host.removeprefix("[").removesuffix("]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, int(port)), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ListenError.of("--metrics", address, listen_reason(error)) from error
    return MetricsServer(listener, registry, transport, pages)


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, str, str]:
    """Return the method, the path and the Accept header of an HTTP request. Raise ValueError if it is
    malformed."""
    request = (await reader.readline()).decode("latin-1").split()
    if len(request) != 3:
        raise ValueError("not an HTTP request")
    accept = ""
    for _ in range(_HEAD_LINES):
        line = (await reader.readline()).decode("latin-1").strip()
        if not line:
            return request[0], request[1].partition("?")[0], accept
        name, _, value = line.partition(":")
        if name.lower() == "accept":
            accept = value.strip()
    raise ValueError("too many header lines")


def _http(status: HTTPStatus, content_type: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + body
