"""One request's life, from its trace and its migrations: where it was, its phases, and its moves. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from tailrace.cli.plain import JsonValue, to_plain, to_plain_list
from tailrace.telemetry import attributes
from tailrace.telemetry.tree import Node, read_traces
from tailrace.v1.admin_pb2 import RequestInfo
from tailrace.v1.migration_pb2 import MigrationRecord
from tailrace.v1.types_pb2 import MIGRATION_STATE_COMMITTED

SPANS_MAX: Final = 2_000
"""Most spans of a life: a client's trace can have many requests."""
_PHASES: Final = ("prefill", "reasoning", "answering")
_NS: Final = 1e9


def life(
    request_id: str,
    request: RequestInfo | None,
    migrations: Sequence[MigrationRecord],
    traces_data: bytes,
) -> dict[str, JsonValue]:
    """Return the life of a request. Times in seconds since the Unix epoch.

    `request`: None if it is over; `traces_data`: its spans that have ended, which may be none. Raise
    google.protobuf.message.DecodeError for other bytes.
    """
    spans = list(_spans_of(request_id, traces_data))[:SPANS_MAX]
    return {
        "id": request_id,
        "request": None if request is None else to_plain(request),
        "migrations": to_plain_list(migrations),
        "spans": [_plain_span(depth, node) for depth, node in spans],
        "phases": [_plain_phase(node) for node in _in_time(spans, _PHASES)],
        "stays": _stays(spans, migrations),
        "tokens": _tokens(spans),
        "ended": next((node.end_ns / _NS for _, node in spans if node.name == attributes.REQUEST_SPAN), None),
    }


def _spans_of(request_id: str, traces_data: bytes) -> Iterator[tuple[int, Node]]:
    """Yield the spans with their depths: below the request's own, or all while that has not ended."""
    tops = [top for trace in read_traces(traces_data) for top in (*trace.roots, *trace.orphans)]
    everything = [pair for top in tops for pair in _walk(top, 0)]
    own = [node for _, node in everything if node.name == attributes.REQUEST_SPAN and _id(node) == request_id]
    others = [top for top in tops if top.name != attributes.REQUEST_SPAN]
    for top in own or others:
        yield from _walk(top, 0)


def _walk(node: Node, depth: int) -> Iterator[tuple[int, Node]]:
    yield depth, node
    for child in node.children:
        yield from _walk(child, depth + 1)


def _id(node: Node) -> str:
    return str(node.attributes.get(attributes.REQUEST_ID, ""))


def _in_time(spans: Iterable[tuple[int, Node]], names: Sequence[str]) -> list[Node]:
    return sorted((node for _, node in spans if node.name in names), key=lambda node: node.start_ns)


def _plain_span(depth: int, node: Node) -> JsonValue:
    return {
        "depth": depth,
        "name": node.name,
        "where": f"{node.service}@{node.instance}" if node.instance else node.service,
        "start": node.start_ns / _NS,
        "end": node.end_ns / _NS,
        "error": node.error,
        "about": {
            key.removeprefix("tailrace."): value if not isinstance(value, list) else ", ".join(value)
            for key, value in node.attributes.items()
        },
    }


def _plain_phase(node: Node) -> JsonValue:
    return {"phase": node.name, "start": node.start_ns / _NS, "end": node.end_ns / _NS}


def _stays(spans: Sequence[tuple[int, Node]], migrations: Iterable[MigrationRecord]) -> list[JsonValue]:
    """Return on which instance the request was from when, and how it came there: placed, moved or lost (then
    it was on none)."""
    found = [
        (node.end_ns / _NS, str(node.attributes.get(attributes.INSTANCE, "")), "placed")
        for node in _in_time(spans, ("placement",))
    ]
    # A recovery begins with the loss of the instance, and has the next placement below it.
    found += [(node.start_ns / _NS, "", "lost") for node in _in_time(spans, ("recovery",))]
    moves = {
        (record.target_instance_id, record.epoch): record.closed_s
        for record in migrations
        if record.state == MIGRATION_STATE_COMMITTED
    }
    for _, node in spans:
        for event in node.events:
            if event.name == "handover":
                target = str(event.attributes.get(attributes.MIGRATION_TARGET, ""))
                epoch = event.attributes.get(attributes.EPOCH, 0)
                # When its front end committed it; the record is closed a little later.
                moves[target, int(epoch) if isinstance(epoch, int) else 0] = event.at_ns / _NS
    found += [(at_s, target, "moved") for (target, _), at_s in moves.items()]
    return [{"at": at_s, "instance": name, "how": how} for at_s, name, how in sorted(found)]


def _tokens(spans: Sequence[tuple[int, Node]]) -> list[JsonValue]:
    """Return pairs of a time and how many output tokens there were, where the trace tells."""
    pairs: list[tuple[float, int]] = []
    made = 0
    for node in _in_time(spans, _PHASES):
        if not pairs:
            pairs.append((node.start_ns / _NS, 0))
        more = node.attributes.get(attributes.TOKENS, 0)
        made += more if isinstance(more, int) else 0
        pairs.append((node.end_ns / _NS, made))
    for _, node in spans:
        for event in node.events:
            tokens = event.attributes.get(attributes.OUTPUT_TOKENS)
            if event.name == "handover" and isinstance(tokens, int):
                pairs.append((event.at_ns / _NS, tokens))
    return [[at_s, tokens] for at_s, tokens in sorted(pairs)]
