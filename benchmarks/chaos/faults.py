"""Carries faults out, and undoes them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Final
from urllib.parse import urlsplit

import grpc

from benchmarks.chaos.answers import Ending, Question, judge
from benchmarks.chaos.cluster import KEY, MODEL, POISON, Cluster, Member
from benchmarks.chaos.load import Load
from benchmarks.chaos.mover import Mover
from benchmarks.chaos.rollouts import Rollouts
from benchmarks.chaos.schedule import Fault, Kind, Tier
from benchmarks.chaos.timeline import Timeline
from benchmarks.etcd_faults.cluster import FaultyMember
from benchmarks.etcd_faults.namespaces import fill
from benchmarks.loadgen import StreamResult, run_stream
from tailrace.v1 import admin_pb2

_CALL_S: Final = 10.0
# A certificate is looked at once a second at most.
_SEEN_S: Final = 1.5
# Two engines die, one after the other; what shared one with it goes first.
_POISON_S: Final = 90.0
_POISON_TOKENS: Final = 20
_DEATHS: Final = 3
_DIED_S: Final = 30.0
_POLL_S: Final = 0.05
_HUGE_BYTES: Final = 64 << 20
_HUGE_S: Final = 60.0
_SLOW_BUFFER: Final = 4096
_SLOW_BYTES: Final = 32
_SLOW_EVERY_S: Final = 0.05
_WHOLE_S: Final = 120.0

_Act = Callable[[Fault], Awaitable[None]]


class Faults:
    """Of one cluster under one load."""

    def __init__(
        self, cluster: Cluster, load: Load, mover: Mover, rollouts: Rollouts, timeline: Timeline
    ) -> None:
        self._cluster = cluster
        self._load = load
        self._mover = mover
        self._rollouts = rollouts
        self._timeline = timeline
        self._etcd = asyncio.Lock()
        self._acts: Mapping[Kind, _Act] = {
            Kind.KILL: self._kill,
            Kind.STOP: self._stop,
            Kind.RESTART: self._restart,
            Kind.DEAF: self._on_link,
            Kind.MUTE: self._on_link,
            Kind.ONE_WAY: self._on_link,
            Kind.CUT: self._on_link,
            Kind.LOSS: self._on_link,
            Kind.SLOW_LINK: self._on_link,
            Kind.FULL_DISK: self._fill_disk,
            Kind.ETCD_STOPPED: self._on_etcd,
            Kind.ETCD_ISOLATED: self._on_etcd,
            Kind.ETCD_CUT: self._on_etcd,
            Kind.ETCD_FULL_DISK: self._on_etcd,
            Kind.ETCD_WIPED: self._on_etcd,
            Kind.CORRUPT_KV: self._corrupt,
            Kind.POISON: self._poison,
            Kind.HUGE_BODY: self._huge,
            Kind.SLOW_READER: self._slow_reader,
            Kind.ROTATE: self._rotate,
            Kind.POLICY: self._switch,
            Kind.ROLLOUT: self._roll_out,
            Kind.UNDONE: self._roll_out_and_back,
        }

    async def carry_out(self, fault: Fault) -> None:
        """From its begin until it is undone and got over. Raises OSError, RuntimeError, TimeoutError."""
        await self._acts[fault.kind](fault)

    def _target(self, fault: Fault) -> Member:
        return self._cluster.members[fault.target]

    @contextmanager
    def _upon(self, fault: Fault) -> Iterator[Member]:
        """The target suffers for the block, and so do the streams that it has now."""
        target = self._target(fault)
        self._mark(fault, target)
        with target.disturbing():
            yield target

    def _mark(self, fault: Fault, target: Member) -> None:
        streams = self._load.by_front(target) if target.tier is Tier.FRONTEND else []
        if target.tier is Tier.WORKER:
            found = map(self._load.named_in, self._mover.on(target.spec.members))
            streams = [stream for stream in found if stream is not None]
        for stream in streams:
            stream.suffered.add(f"{fault.kind} of its {target.tier}")

    # ---- processes

    async def _kill(self, fault: Fault) -> None:
        with self._upon(fault) as target:
            self._cluster.kill(target)
        await target.ready_again()

    async def _stop(self, fault: Fault) -> None:
        with self._upon(fault) as target:
            target.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(fault.seconds)
            finally:
                target.signal(signal.SIGCONT)

    async def _restart(self, fault: Fault) -> None:
        with self._upon(fault) as target:
            await self._cluster.restart(target)

    # ---- links

    async def _on_link(self, fault: Fault) -> None:
        with self._upon(fault) as target, ExitStack() as both:
            link = target.link
            if fault.kind is Kind.ONE_WAY:
                other = self._cluster.members[fault.other]
                both.enter_context(other.disturbing())
                await asyncio.to_thread(link.deafen_to, other.link.address)
            else:
                act = {
                    Kind.DEAF: link.deafen,
                    Kind.MUTE: link.mute,
                    Kind.CUT: link.cut,
                    Kind.LOSS: link.lose,
                    Kind.SLOW_LINK: link.slow_down,
                }[fault.kind]
                await asyncio.to_thread(act)
            try:
                await asyncio.sleep(fault.seconds)
            finally:
                link.mend()

    # ---- disks and etcd

    async def _fill_disk(self, fault: Fault) -> None:
        with self._upon(fault) as target:
            await asyncio.to_thread(fill, target.disk)
            try:
                await asyncio.sleep(fault.seconds)
            finally:
                (target.disk / "filler").unlink()

    async def _on_etcd(self, fault: Fault) -> None:
        # One member at a time: two of three are needed.
        async with self._etcd:
            etcd = self._cluster.etcd
            (member,) = [each for each in etcd.members if each.name == fault.target]
            if fault.kind is Kind.ETCD_WIPED:
                other = next(each for each in etcd.members if each is not member)
                await asyncio.to_thread(member.wipe, other, self._cluster.root)
            else:
                begin, end = {
                    Kind.ETCD_STOPPED: (FaultyMember.freeze, FaultyMember.thaw),
                    Kind.ETCD_ISOLATED: (FaultyMember.isolate, FaultyMember.rejoin),
                    Kind.ETCD_CUT: (FaultyMember.cut, FaultyMember.mend),
                    Kind.ETCD_FULL_DISK: (FaultyMember.fill_disk, FaultyMember.empty_disk),
                }[fault.kind]
                await asyncio.to_thread(begin, member)
                try:
                    await asyncio.sleep(fault.seconds)
                finally:
                    end(member)
            await etcd.healthy()

    # ---- requests

    async def _corrupt(self, fault: Fault) -> None:
        target = self._target(fault)
        partial = target.faults.with_suffix(".partial")
        partial.write_text(json.dumps({"corrupt": "kv"}))
        partial.replace(target.faults)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            target.faults.unlink()

    async def _poison(self, fault: Fault) -> None:
        front = self._target(fault)
        question = Question(POISON, _POISON_TOKENS, 0)
        runs = front.starts
        # A process whose engine has died takes a moment to end, on a busy machine a long one.
        self._cluster.allow_deaths(_DEATHS, _POISON_S + _DIED_S)
        message = question.message(front.spec.http, f"poison-{fault.number}")
        result = await run_stream(front.spec.http, message, _POISON_S)
        said = result.body[-200:].decode(errors="replace")
        if result.tokens or not (b"error" in result.body or front.starts != runs):
            self._timeline.broken(f"the poison was answered: HTTP {result.status} {result.error} {said}")

    async def _huge(self, fault: Fault) -> None:
        front = self._target(fault)
        status = await asyncio.wait_for(_post_huge(front.spec.http), _HUGE_S)
        if not (status == 0 or 400 <= status < 500):
            self._timeline.broken(f"{front.name} answered a huge body with {status}")

    async def _slow_reader(self, fault: Fault) -> None:
        front = self._target(fault)
        await front.ready_again()
        question, right = self._load.longest()
        runs = front.starts
        message = question.message(front.spec.http, f"slow-{fault.number}")
        async with asyncio.timeout(fault.seconds + _WHOLE_S):
            result = await _read_slowly(front.spec.http, message, fault.seconds)
        verdict = judge(result, right)
        if verdict.ending is not Ending.WHOLE and front.starts == runs and not front.disturbed:
            told = f"{verdict.ending}: {verdict.why}"
            self._timeline.broken(f"a slow reader's stream on {front.name} {told}")

    # ---- operators

    async def _rotate(self, fault: Fault) -> None:
        await asyncio.to_thread(self._cluster.authority.rotate)
        await asyncio.sleep(_SEEN_S)

    async def _roll_out(self, fault: Fault) -> None:
        await self._rollouts.swap()

    async def _roll_out_and_back(self, fault: Fault) -> None:
        await self._rollouts.swap_and_undo(fault.seconds)

    async def _switch(self, fault: Fault) -> None:
        request = admin_pb2.SetPolicyRequest(name=fault.other)
        until_s = time.monotonic() + _WHOLE_S
        while time.monotonic() < until_s:
            for scheduler in self._cluster.of(Tier.SCHEDULER):
                channel, stub = self._cluster.admin_stub(scheduler)
                async with channel:
                    try:
                        await stub.SetPolicy(request, timeout=_CALL_S)
                        return
                    except grpc.aio.AioRpcError as error:
                        said = error.details()
            await asyncio.sleep(0.2)
        self._timeline.broken(f"no scheduler took a policy for {_WHOLE_S:.0f} s: {said}")


async def _post_huge(url: str) -> int:
    """The status of an answer to far too large a body; 0 where the connection was closed."""
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
    """One stream, read a few bytes at a time for so long, with the smallest buffers; then all the rest."""
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
            while data and (data := await loop.sock_recv(connection, 1 << 16)):
                body += data
        except OSError as error:
            result.error = str(error)
    result.body = bytes(body)
    result.status = int(body[9:12] or b"0")
    return result
