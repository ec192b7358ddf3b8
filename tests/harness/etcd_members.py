"""Three real etcd members, each with its own networks and disk, that can be stopped, partitioned and filled
up."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tailrace.security.credentials import AUTHORITIES, CERTIFICATE, KEY
from tailrace.service.etcd import certificate_arguments, find_etcd
from tests.harness.namespaces import fill, ip, run
from tests.waiting import WAIT_S

COUNT: Final = 3
_PORT: Final = 2379
_PEER_PORT: Final = 2380
_HEALTH_PORT: Final = 2381
CLIENTS: Final = "10.77.1"
"""Network of clients, a /24 with a bridge called `clients`; this command has .254 there."""
_PEERS: Final = "10.77.2"
_HOST_NUMBER: Final = 254
# etcd preallocates its log in files of 64 MiB, one ahead.
_DISK: Final = "size=160m"
_IMAGE: Final = "200M"
_POLL_S: Final = 0.05


def member_addresses(number: int) -> list[str]:
    """Return a member's addresses, for clients and for other members."""
    return [f"{CLIENTS}.{number + 1}", f"{_PEERS}.{number + 1}"]


class FaultyMember:
    """One member, reached by clients over one network and by other members over another."""

    def __init__(self, number: int, folder: Path, hanging: bool, certificates: Path | None) -> None:
        """`hanging`: make a disk that can hang. `certificates`: folder of its certificate."""
        self.name = f"m{number}"
        self.host = f"{CLIENTS}.{number + 1}"
        self.endpoint = f"{self.host}:{_PORT}"
        self._number = number
        self._disk = folder / self.name
        self._log = folder / f"{self.name}.log"
        self._hanging = hanging
        self._certificates = certificates
        self._state = "new"
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Create its networks and its disk."""
        ip("netns", "add", self.name)
        for network, prefix in (("clients", CLIENTS), ("peers", _PEERS)):
            outside = self._host_device(network)
            ip("link", "add", outside, "type", "veth", "peer", "name", network, "netns", self.name)
            ip("link", "set", outside, "master", network, "up")
            ip("-n", self.name, "addr", "add", f"{prefix}.{self._number + 1}/24", "dev", network)
            ip("-n", self.name, "link", "set", network, "up")
        ip("-n", self.name, "link", "set", "lo", "up")
        self._disk.mkdir()
        if self._hanging:
            image = self._disk.with_suffix(".ext4")
            run("truncate", "--size", _IMAGE, str(image))
            run("mkfs.ext4", "-q", str(image))
            run("mount", "-o", "loop", str(image), str(self._disk))
        else:
            run("mount", "-t", "tmpfs", "-o", _DISK, "tmpfs", str(self._disk))

    def start(self) -> None:
        """Start or restart etcd on its data."""
        scheme = "http" if self._certificates is None else "https"
        peers = {f"m{n}": f"{scheme}://{_PEERS}.{n + 1}:{_PEER_PORT}" for n in range(COUNT)}
        peer, client = peers[self.name], f"{scheme}://{self.endpoint}"
        arguments = {
            "name": self.name,
            "data-dir": str(self._disk / "data"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": ",".join(f"{name}={url}" for name, url in peers.items()),
            "initial-cluster-state": self._state,
            "listen-metrics-urls": f"http://{self.host}:{_HEALTH_PORT}",
            "logger": "zap",
            "log-level": "warn",
        }
        if self._certificates is not None:
            arguments |= certificate_arguments(self._certificates)
        command = ["ip", "netns", "exec", self.name, str(find_etcd())]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *(f"--{name}={value}" for name, value in arguments.items())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def is_leader(self) -> bool:
        """Return whether it reports to be etcd's leader; False if it does not reply."""
        try:
            with urllib.request.urlopen(f"http://{self.host}:{_HEALTH_PORT}/metrics", timeout=1) as reply:
                return b"\netcd_server_is_leader 1\n" in reply.read()
        except OSError:
            return False

    def healthy(self) -> bool:
        """Return whether it can write."""
        try:
            with urllib.request.urlopen(f"http://{self.host}:{_HEALTH_PORT}/health", timeout=2) as reply:
                return b'"true"' in reply.read()
        except OSError:
            return False

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    # ---- faults

    def suspend(self) -> None:
        """SIGSTOP."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def isolate(self) -> None:
        """Partition it from the other members; clients still reach it."""
        ip("link", "set", self._host_device("peers"), "nomaster")

    def rejoin(self) -> None:
        """Undo `isolate`."""
        ip("link", "set", self._host_device("peers"), "master", "peers")

    def cut(self) -> None:
        """Partition it from everything: packets to it are dropped silently."""
        self.isolate()
        ip("link", "set", self._host_device("clients"), "nomaster")

    def restore(self) -> None:
        """Undo `cut`."""
        self.rejoin()
        ip("link", "set", self._host_device("clients"), "master", "clients")

    def fill_disk(self) -> None:
        """Use up all space on its disk."""
        fill(self._disk)

    def free_disk(self) -> None:
        """Undo `fill_disk`, and restart the process if it has exited, as a supervisor would."""
        (self._disk / "filler").unlink()
        if not self.alive:
            self.start()

    def hang_disk(self) -> None:
        """Block every write to its disk; blocked processes cannot be killed."""
        run("fsfreeze", "--freeze", str(self._disk))

    def resume_disk(self) -> None:
        """Undo `hang_disk`."""
        run("fsfreeze", "--unfreeze", str(self._disk))

    def wipe(self, by: FaultyMember, root: Path | None) -> None:
        """Kill it and delete its data; then replace it, as etcd's manual describes: the others remove it and
        add it as a new member.

        `by`: another member, which executes the commands. `root`: folder of a certificate of root. Raise
        RuntimeError if a command fails.
        """
        self.kill()
        shutil.rmtree(self._disk / "data")
        lines = by.control(root, "member", "list").splitlines()
        (known,) = [line.split(", ")[0] for line in lines if f", {self.name}, " in line]
        scheme = "http" if self._certificates is None else "https"
        by.control(root, "member", "remove", known)
        by.control(
            root,
            *("member", "add", self.name),
            f"--peer-urls={scheme}://{_PEERS}.{self._number + 1}:{_PEER_PORT}",
        )
        self._state = "existing"
        self.start()

    def control(self, root: Path | None, *arguments: str) -> str:
        """Run `etcdctl` on this member; return its output. Raise RuntimeError if it fails."""
        command = [
            str(find_etcd().with_name("etcdctl")),
            f"--endpoints={self.endpoint}",
            "--command-timeout=10s",
        ]
        if root is not None:
            command[1] = f"--endpoints=https://{self.endpoint}"
            command += [
                f"--cacert={root / AUTHORITIES}",
                f"--cert={root / CERTIFICATE}",
                f"--key={root / KEY}",
            ]
        return run(*command, *arguments)

    def kill(self) -> None:
        """Send SIGKILL and wait."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _host_device(self, network: str) -> str:
        return f"{network}{self._number}"


class FaultyCluster:
    """All three members."""

    def __init__(self, folder: Path, hanging: bool, certificates: Sequence[Path] = ()) -> None:
        """`hanging`: make disks that can hang. `certificates`: one folder per member; none: no TLS."""
        folders: list[Path | None] = [*certificates] or [None] * COUNT
        self.members = [FaultyMember(number, folder, hanging, folders[number]) for number in range(COUNT)]

    @property
    def endpoints(self) -> list[str]:
        """HOST:PORT of each member."""
        return [member.endpoint for member in self.members]

    async def start(self) -> None:
        """Create networks and disks, start all processes, and wait until all members can write. Raise
        TimeoutError or RuntimeError if that fails."""
        for network, prefix in (("clients", CLIENTS), ("peers", _PEERS)):
            ip("link", "add", network, "type", "bridge")
            ip("addr", "add", f"{prefix}.{_HOST_NUMBER}/24", "dev", network)
            ip("link", "set", network, "up")
        for member in self.members:
            member.prepare()
        self.launch()
        await self.wait_healthy()

    def launch(self) -> None:
        """Start or restart all processes."""
        for member in self.members:
            member.start()

    async def wait_healthy(self) -> None:
        """Wait until all members can write. Raise TimeoutError if they cannot in time."""
        for member in self.members:
            await _wait_until(member.healthy)

    async def leader(self) -> FaultyMember:
        """Return etcd's current leader. Raise TimeoutError if there is none."""
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            for member in self.members:
                if await asyncio.to_thread(member.is_leader):
                    return member
            await asyncio.sleep(_POLL_S)
        raise TimeoutError("etcd has no leader")

    def kill(self) -> None:
        """Kill all members."""
        for member in self.members:
            member.kill()


async def _wait_until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await asyncio.to_thread(holds):  # noqa: ASYNC110 - etcd is polled
            await asyncio.sleep(_POLL_S)
