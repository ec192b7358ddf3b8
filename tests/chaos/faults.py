"""Inject faults, and undo them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Final
from urllib.parse import urlsplit

import grpc
import psutil

from tailrace.store.store import Store
from tailrace.v1 import admin_pb2
from tests.chaos.answers import Ending, Question, judge
from tests.chaos.cluster import CLUSTER, KEY, MODEL, POISON, Cluster, Member
from tests.chaos.gaps import Exposure
from tests.chaos.load import Load
from tests.chaos.mover import Mover
from tests.chaos.rollouts import Rollouts
from tests.chaos.schedule import Fault, Kind, Tier
from tests.chaos.timeline import Timeline
from tests.harness.etcd_members import FaultyMember
from tests.harness.loadgen import StreamResult, run_stream
from tests.harness.namespaces import fill

_CALL_S: Final = 10.0
# Processes check their certificate at most once a second.
_CERTIFICATE_POLL_S: Final = 1.5
# Two engines die, one after the other; an engine in the same process exits with the first.
_POISON_S: Final = 90.0
_POISON_TOKENS: Final = 20
_DEATHS: Final = 3
_EXIT_S: Final = 30.0
_POLL_S: Final = 0.05
_HUGE_BYTES: Final = 64 << 20
_HUGE_S: Final = 60.0
_SLOW_BUFFER: Final = 4096
_FAST_BUFFER: Final = 1 << 20
_SLOW_BYTES: Final = 32
_SLOW_EVERY_S: Final = 0.05
_COMPLETE_S: Final = 120.0
_PROXY: Final = "envoy"
_LONG_ID: Final = 7_500
_LONG_IDS: Final = 100
_SOUND_POLICY: Final = "tailrace"
# Records of members, and of the deployment's settings.
_FOLDERS: Final = ("instances/", "services/scheduler/", "pools/", "profiles/", "rollouts/")
_SETTINGS: Final = ("policy", "stages", "slo")
_RECORD_BYTES: Final = 200

_Handler = Callable[[Fault], Awaitable[None]]


class Faults:
    """Inject faults into one cluster under one load."""

    def __init__(
        self, cluster: Cluster, load: Load, mover: Mover, rollouts: Rollouts, timeline: Timeline
    ) -> None:
        self._cluster = cluster
        self._load = load
        self._mover = mover
        self._rollouts = rollouts
        self._timeline = timeline
        self._etcd = asyncio.Lock()
        self._handlers: Mapping[Kind, _Handler] = {
            Kind.KILL: self._kill,
            Kind.STOP: self._stop,
            Kind.RESTART: self._restart,
            Kind.PROXY_KILLED: self._kill_proxy,
            Kind.DEAF: self._impair_link,
            Kind.MUTE: self._impair_link,
            Kind.ONE_WAY: self._impair_link,
            Kind.CUT: self._impair_link,
            Kind.LOSS: self._impair_link,
            Kind.SLOW_LINK: self._impair_link,
            Kind.FULL_DISK: self._fill_disk,
            Kind.ETCD_STOPPED: self._impair_etcd,
            Kind.ETCD_ISOLATED: self._impair_etcd,
            Kind.ETCD_CUT: self._impair_etcd,
            Kind.ETCD_FULL_DISK: self._impair_etcd,
            Kind.ETCD_WIPED: self._impair_etcd,
            Kind.ETCD_LOST: self._lose_etcd,
            Kind.CORRUPT_KV: self._corrupt_kv,
            Kind.POISON: self._send_poison,
            Kind.HUGE_BODY: self._send_huge_body,
            Kind.SLOW_READER: self._read_slowly_from,
            Kind.ROTATE: self._rotate,
            Kind.POLICY: self._switch_policy,
            Kind.WRONG_POLICY: self._set_wrong_policy,
            Kind.UNREADABLE: self._write_unreadable_records,
            Kind.LONG_IDS: self._send_long_ids,
            Kind.ROLLOUT: self._roll_out,
            Kind.UNDONE: self._roll_out_and_back,
        }

    async def inject(self, fault: Fault) -> None:
        """Inject a fault, undo it, and wait for recovery. Raise OSError, RuntimeError or TimeoutError if that
        fails."""
        await self._handlers[fault.kind](fault)

    def _target(self, fault: Fault) -> Member:
        return self._cluster.members[fault.target]

    @contextmanager
    def _on_target(self, fault: Fault) -> Iterator[Member]:
        """Mark the target, and the streams on it now, as affected; the fault is in progress for the block."""
        target = self._target(fault)
        exposures = self._expose_streams(fault, target)
        try:
            with target.under_fault():
                yield target
        finally:
            for exposure in exposures:
                exposure.end()

    def _expose_streams(self, fault: Fault, target: Member) -> list[Exposure]:
        streams = self._load.streams_of(target)
        if target.tier is Tier.FRONTEND:
            # Which ones the edge sends to it is not known.
            for edge in self._cluster.in_tier(Tier.EDGE):
                streams += self._load.streams_of(edge)
        if target.tier is Tier.WORKER:
            found = map(self._load.find_stream, self._mover.requests_on(target.spec.members))
            streams = [stream for stream in found if stream is not None]
        return [stream.expose(f"{fault.kind} of its {target.tier}") for stream in streams]

    # ---- processes

    async def _kill(self, fault: Fault) -> None:
        with self._on_target(fault) as target:
            self._cluster.kill(target)
        await target.wait_ready()

    async def _stop(self, fault: Fault) -> None:
        with self._on_target(fault) as target:
            target.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(fault.seconds)
            finally:
                target.signal(signal.SIGCONT)

    async def _restart(self, fault: Fault) -> None:
        with self._on_target(fault) as target:
            await self._cluster.restart(target)

    async def _kill_proxy(self, fault: Fault) -> None:
        """Kill Envoy alone; the edge must end, and is restarted."""
        with self._on_target(fault) as target:
            proxies = [pid for pid in target.pids if psutil.Process(pid).name() == _PROXY]
            self._cluster.end(target, proxies)
            if not proxies:
                raise RuntimeError(f"{target.name} has no proxy")
        await target.wait_ready()

    # ---- links

    async def _impair_link(self, fault: Fault) -> None:
        with self._on_target(fault) as target, ExitStack() as both:
            link = target.link
            if fault.kind is Kind.ONE_WAY:
                other = self._cluster.members[fault.other]
                both.enter_context(other.under_fault())
                await asyncio.to_thread(link.drop_incoming_from, other.link.address)
            else:
                act = {
                    Kind.DEAF: link.drop_incoming,
                    Kind.MUTE: link.drop_outgoing,
                    Kind.CUT: link.cut,
                    Kind.LOSS: link.drop_some,
                    Kind.SLOW_LINK: link.limit_rate,
                }[fault.kind]
                await asyncio.to_thread(act)
            try:
                await asyncio.sleep(fault.seconds)
            finally:
                link.restore()

    # ---- disks and etcd

    async def _fill_disk(self, fault: Fault) -> None:
        with self._on_target(fault) as target:
            await asyncio.to_thread(fill, target.disk)
            try:
                await asyncio.sleep(fault.seconds)
            finally:
                (target.disk / "filler").unlink()

    async def _impair_etcd(self, fault: Fault) -> None:
        # One member at a time: etcd needs two of three.
        async with self._etcd:
            etcd = self._cluster.etcd
            (member,) = [each for each in etcd.members if each.name == fault.target]
            if fault.kind is Kind.ETCD_WIPED:
                other = next(each for each in etcd.members if each is not member)
                await asyncio.to_thread(member.wipe, other, self._cluster.root)
            else:
                begin, end = {
                    Kind.ETCD_STOPPED: (FaultyMember.suspend, FaultyMember.resume),
                    Kind.ETCD_ISOLATED: (FaultyMember.isolate, FaultyMember.rejoin),
                    Kind.ETCD_CUT: (FaultyMember.cut, FaultyMember.restore),
                    Kind.ETCD_FULL_DISK: (FaultyMember.fill_disk, FaultyMember.free_disk),
                }[fault.kind]
                await asyncio.to_thread(begin, member)
                try:
                    await asyncio.sleep(fault.seconds)
                finally:
                    end(member)
            await etcd.wait_healthy()

    # ---- requests

    async def _lose_etcd(self, fault: Fault) -> None:
        """Partition it from all of etcd; it still serves."""
        hosts = [each.host for each in self._cluster.etcd.members]
        # No other fault of it meanwhile: a service that finds no etcd when it starts exits after a while.
        with self._on_target(fault) as target:
            await asyncio.to_thread(target.link.lose, hosts)
            try:
                await asyncio.sleep(fault.seconds)
            finally:
                target.link.find(hosts)

    async def _corrupt_kv(self, fault: Fault) -> None:
        target = self._target(fault)
        partial = target.faults.with_suffix(".partial")
        partial.write_text(json.dumps({"corrupt": "kv"}))
        partial.replace(target.faults)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            target.faults.unlink()

    async def _send_poison(self, fault: Fault) -> None:
        front = self._target(fault)
        question = Question(POISON, _POISON_TOKENS, 0)
        starts = front.starts
        # A process takes a moment to exit after its engine has died, longer on a busy machine.
        self._cluster.allow_deaths(_DEATHS, _POISON_S + _EXIT_S)
        request = question.http_request(front.spec.http, f"poison-{fault.number}")
        result = await run_stream(front.spec.http, request, _POISON_S)
        body_end = result.body[-200:].decode(errors="replace")
        if result.tokens or not (b"error" in result.body or front.starts != starts):
            self._timeline.violation(
                f"the poison was answered: HTTP {result.status} {result.error} {body_end}"
            )

    async def _send_huge_body(self, fault: Fault) -> None:
        front = self._target(fault)
        status = await asyncio.wait_for(_post_huge(front.spec.http), _HUGE_S)
        if not (status == 0 or 400 <= status < 500):
            self._timeline.violation(f"{front.name} answered a huge body with {status}")

    async def _send_long_ids(self, fault: Fault) -> None:
        front = self._target(fault)
        await front.wait_ready()
        starts = front.starts
        question, _ = self._load.longest_question()
        request = question.http_request(front.spec.http, "x" * _LONG_ID)
        async with asyncio.timeout(_HUGE_S):
            results = await asyncio.gather(
                *(run_stream(front.spec.http, request, _HUGE_S) for _ in range(_LONG_IDS))
            )
        # vLLM's Rust API server begins a stream before it is refused.
        tokens = sum(result.tokens for result in results)
        if tokens and front.starts == starts:
            body_end = results[0].body[-200:].decode(errors="replace")
            self._timeline.violation(f"{front.name} answered long request IDs: {tokens} tokens {body_end}")

    async def _read_slowly_from(self, fault: Fault) -> None:
        front = self._target(fault)
        await front.wait_ready()
        question, expected = self._load.longest_question()
        starts = front.starts
        request = question.http_request(front.spec.http, f"slow-{fault.number}")
        try:
            async with asyncio.timeout(fault.seconds + _COMPLETE_S):
                result = await _read_slowly(front.spec.http, request, fault.seconds)
        except TimeoutError:
            if front.starts == starts:
                raise
            # The connection ended with the front end, and the kernel did not get to say so: a full small
            # buffer and lost packets make it wait for minutes.
            return
        verdict = judge(result, expected)
        if verdict.ending is not Ending.WHOLE and front.starts == starts and not front.active_faults:
            self._timeline.violation(
                f"a slow reader's stream on {front.name} {verdict.ending}: {verdict.reason}"
            )

    # ---- operators

    async def _rotate(self, fault: Fault) -> None:
        await asyncio.to_thread(self._cluster.authority.rotate)
        await asyncio.sleep(_CERTIFICATE_POLL_S)

    async def _roll_out(self, fault: Fault) -> None:
        await self._rollouts.swap()

    async def _roll_out_and_back(self, fault: Fault) -> None:
        await self._rollouts.swap_and_undo(fault.seconds)

    async def _switch_policy(self, fault: Fault) -> None:
        await self._set_policy(fault.other)

    async def _set_wrong_policy(self, fault: Fault) -> None:
        """Let it decide for a while; then another one must be accepted."""
        await self._set_policy(fault.other)
        await asyncio.sleep(fault.seconds)
        await self._set_policy(_SOUND_POLICY)

    async def _write_unreadable_records(self, fault: Fault) -> None:
        """Put what no version can read beside, and for settings in place of, what is there."""
        client = self._cluster.root_client()
        store = Store(client, CLUSTER)
        settings = {key: await store.get(key) for key in _SETTINGS}
        keys = [*(f"{folder}unreadable-{fault.number}" for folder in _FOLDERS), *_SETTINGS]
        rng = Random(fault.number)
        try:
            for key in keys:
                await store.put(key, b"\xff" + rng.randbytes(_RECORD_BYTES))
            await asyncio.sleep(fault.seconds)
        finally:
            for key in keys:
                value = settings.get(key)
                await (store.delete(key) if value is None else store.put(key, value))
            await client.close()

    async def _set_policy(self, name: str) -> None:
        request = admin_pb2.SetPolicyRequest(name=name)
        until_s = time.monotonic() + _COMPLETE_S
        while time.monotonic() < until_s:
            for scheduler in self._cluster.in_tier(Tier.SCHEDULER):
                channel, stub = self._cluster.admin_stub(scheduler)
                async with channel:
                    try:
                        await stub.SetPolicy(request, timeout=_CALL_S)
                        return
                    except grpc.aio.AioRpcError as error:
                        details = error.details()
            await asyncio.sleep(0.2)
        self._timeline.violation(f"no scheduler accepted a policy for {_COMPLETE_S:.0f} s: {details}")


async def _post_huge(url: str) -> int:
    """Send far too large a body; return the HTTP status, or 0 if the connection was closed."""
    parts = urlsplit(url)
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except OSError:
        return 0
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {_HUGE_BYTES}\r\nConnection: close\r\n\r\n"
    )
    try:
        writer.write(head.encode() + b'{"model": "%s", "prompt": "' % MODEL.encode())
        with contextlib.suppress(ConnectionError):
            for _ in range(_HUGE_BYTES >> 16):
                writer.write(b"a" * (1 << 16))
                await writer.drain()
        line = await reader.readline()
        return int(line.split()[1]) if line else 0
    except ConnectionError:
        return 0
    finally:
        writer.close()


async def _read_slowly(url: str, message: bytes, seconds: float) -> StreamResult:
    """Run one stream: read a few bytes at a time for so many seconds, with minimal buffers, then the rest."""
    parts = urlsplit(url)
    result = StreamResult(time.perf_counter())
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BUFFER)
        body = bytearray()
        try:
            await loop.sock_connect(connection, (parts.hostname, parts.port))
            await loop.sock_sendall(connection, message)
            until_s = time.monotonic() + seconds
            while data := await loop.sock_recv(connection, _SLOW_BYTES):
                body += data
                if time.monotonic() > until_s:
                    break
                await asyncio.sleep(_SLOW_EVERY_S)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _FAST_BUFFER)
            while data and (data := await loop.sock_recv(connection, 1 << 16)):
                body += data
        except OSError as error:
            result.error = str(error)
    result.body = bytes(body)
    result.status = int(body[9:12] or b"0")
    return result
