"""What the console shows in tests: fleets of any size that move by themselves, and a request's life."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, TracesData

from tailrace.v1 import admin_pb2 as admin
from tailrace.v1 import migration_pb2, types_pb2
from tests.cli.scripted_admin import Script

_STEP_S: Final = 0.5


class MovingFleet:
    """A script whose requests make tokens, move, end and come."""

    def __init__(self, instances: int, requests: int, seed: int = 0) -> None:
        self.script = Script()
        self._random = random.Random(seed)
        self._names = [f"worker-{number}" for number in range(instances)]
        self._came = 0
        self.script.instances = [
            admin.InstanceInfo(
                instance_id=name,
                incarnation="1",
                engine="simulated",
                model="tiny",
                state=types_pb2.INSTANCE_STATE_ACTIVE,
                pool=types_pb2.POOL_PREFILL if number % 4 == 0 else types_pb2.POOL_DECODE,
                kv_blocks_total=4096,
                block_tokens=16,
                token_interval_ms=12.0,
            )
            for number, name in enumerate(self._names)
        ]
        self.script.requests = [self._new() for _ in range(requests)]
        self.script.policies = [
            admin.PolicyInfo(
                name="tailrace",
                summary="moves requests when an instance falls behind",
                active=True,
                batch_order="earliest_due",
                parameters=[
                    admin.PolicyParameter(
                        name="move_gain", type="float", default="0.1", value="0.2", allowed="0 to 1"
                    )
                ],
            ),
            admin.PolicyInfo(name="least_loaded", summary="fewest requests"),
        ]
        self.script.shadow = admin.Shadow(
            name="pascal",
            policy="tailrace",
            counts=[admin.ShadowCount(point="place", same=900, different=100)],
        )
        self.step()

    def _new(self) -> admin.RequestInfo:
        self._came += 1
        draw = self._random
        return admin.RequestInfo(
            request_id=f"chatcmpl-{draw.getrandbits(96):024x}-{self._came}",
            frontend_id="frontend",
            instance_id=draw.choice(self._names),
            phase=draw.choice(
                (types_pb2.PHASE_PREFILL, *(types_pb2.PHASE_REASONING, types_pb2.PHASE_ANSWERING) * 2)
            ),
            state=draw.choice((types_pb2.REQUEST_STATE_WAITING, *(types_pb2.REQUEST_STATE_RUNNING,) * 5)),
            prompt_tokens=draw.randrange(50, 4000),
            output_tokens=draw.randrange(1500),
            max_tokens=4000,
            kv_blocks=draw.randrange(5, 200),
            age_s=draw.random() * 60,
        )

    def step(self) -> None:
        """Let half a second pass."""
        script, draw = self.script, self._random
        requests = []
        moved = []
        for old in script.requests:
            request = admin.RequestInfo()
            request.CopyFrom(old)
            request.age_s += _STEP_S
            if draw.random() < 0.01:
                request = self._new()
            elif draw.random() < 0.004:
                source, request.instance_id = request.instance_id, draw.choice(self._names)
                request.epoch += 1
                moved.append((request, source))
            elif request.state == types_pb2.REQUEST_STATE_RUNNING:
                request.output_tokens += 40
            requests.append(request)
        now_s = time.time()
        script.migrations = [
            *(
                migration_pb2.MigrationRecord(
                    migration_id=f"{request.request_id}-{request.epoch}",
                    request_id=request.request_id,
                    source_instance_id=source,
                    target_instance_id=request.instance_id,
                    epoch=request.epoch,
                    state=types_pb2.MIGRATION_STATE_COMMITTED,
                    way=types_pb2.WAY_LIVE,
                    opened_s=now_s - 0.3,
                    closed_s=now_s,
                    bytes=30_000_000,
                    pause_ms=draw.random() * 20,
                    reason="ahead",
                )
                for request, source in moved
            ),
            *script.migrations[:500],
        ]
        script.requests = requests
        loads: dict[str, list[admin.RequestInfo]] = {name: [] for name in self._names}
        for request in requests:
            loads[request.instance_id].append(request)
        instances = []
        for old_instance in script.instances:
            instance = admin.InstanceInfo()
            instance.CopyFrom(old_instance)
            mine = loads[instance.instance_id]
            instance.running = sum(request.state == 2 for request in mine)
            instance.waiting = len(mine) - instance.running
            instance.kv_blocks_used = min(4096, sum(request.kv_blocks for request in mine))
            instance.generated_tokens += 40 * instance.running
            instances.append(instance)
        script.instances = instances
        script.recent = admin.RecentFigures(answers=4000, slo_attainment=0.97, moves_in=len(moved) * 120)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Step in real time during the block."""
        stopped = threading.Event()

        def run() -> None:
            while not stopped.wait(_STEP_S):
                self.step()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()


Value = str | int


def _pairs(values: dict[str, Value]) -> list[KeyValue]:
    return [
        KeyValue(
            key=key,
            value=AnyValue(int_value=value) if isinstance(value, int) else AnyValue(string_value=value),
        )
        for key, value in values.items()
    ]


def _span(name: str, number: int, begin_s: float, end_s: float, parent: int = 1, **about: Value) -> Span:
    return Span(
        trace_id=bytes(range(16)),
        span_id=number.to_bytes(8, "big"),
        parent_span_id=parent.to_bytes(8, "big") if parent else b"",
        name=name,
        start_time_unix_nano=int(begin_s * 1e9),
        end_time_unix_nano=int(end_s * 1e9),
        attributes=_pairs({f"tailrace.{key}": value for key, value in about.items()}),
    )


def eventful_life(request_id: str, began_s: float) -> tuple[bytes, list[migration_pb2.MigrationRecord]]:
    """Return the trace and the migrations of a request that moved twice and lost its instance once."""
    t = began_s
    root = _span("request", 1, t, t + 12, 0, request_id=request_id, output_tokens=900, outcome="finished")
    for at_s, source, target, epoch, tokens in (
        (t + 3, "worker-0", "worker-1", 1, 200),
        (t + 9, "worker-2", "worker-3", 3, 640),
    ):
        event = root.events.add(name="handover", time_unix_nano=int(at_s * 1e9))
        about: dict[str, Value] = {
            "tailrace.migration.source": source,
            "tailrace.migration.target": target,
            "tailrace.epoch": epoch,
            "tailrace.output_tokens": tokens,
        }
        event.attributes.extend(_pairs(about))
    spans = [
        root,
        _span("placement", 2, t, t + 0.01, instance="worker-0", policy="tailrace"),
        _span("prefill", 3, t + 0.01, t + 0.6, tokens=1, instance="worker-0"),
        _span("reasoning", 4, t + 0.6, t + 6, tokens=419, instance="worker-0"),
        _span("recovery", 5, t + 6, t + 6.5, instance="worker-1", reason="lost"),
        _span("placement", 6, t + 6, t + 6.5, 5, instance="worker-2", policy="tailrace"),
        _span("reasoning", 7, t + 6.5, t + 8, tokens=120, instance="worker-2"),
        _span("answering", 8, t + 8, t + 12, tokens=360, instance="worker-2"),
    ]
    about_process = _pairs({"service.name": "tailrace-frontend", "service.instance.id": "frontend"})
    traces = TracesData(
        resource_spans=[
            ResourceSpans(resource=Resource(attributes=about_process), scope_spans=[ScopeSpans(spans=spans)])
        ]
    )
    migrations = [
        migration_pb2.MigrationRecord(
            migration_id=f"m-{epoch}",
            request_id=request_id,
            source_instance_id=source,
            target_instance_id=target,
            epoch=epoch,
            state=types_pb2.MIGRATION_STATE_COMMITTED,
            way=types_pb2.WAY_LIVE,
            opened_s=at_s - 0.2,
            closed_s=at_s + 0.01,
            bytes=12_000_000,
            pause_ms=6.5,
            reason="ahead",
        )
        for at_s, source, target, epoch in (
            (t + 3, "worker-0", "worker-1", 1),
            (t + 9, "worker-2", "worker-3", 3),
        )
    ]
    return traces.SerializeToString(), migrations
