"""A network namespace for one process of the cluster, and the faults of its only link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tests.chaos.xdp import XdpPrograms
from tests.harness.etcd_members import CLIENTS
from tests.harness.namespaces import ip, run

_DEVICE: Final = "part"
_BRIDGE: Final = "clients"
_LOSS: Final = 0.05
# 1 MB takes eight seconds.
_SLOW: Final = ("rate", "1mbit", "burst", "16kb", "latency", "200ms")


class Link:
    """The link from a process's namespace to the common bridge. `restore` undoes all faults."""

    def __init__(self, name: str, number: int, programs: XdpPrograms | None) -> None:
        """`number`: the last octet of its address. Without `programs` it can only be cut and slowed down."""
        self.namespace = name
        self.address = f"{CLIENTS}.{number}"
        self._bridge_end = f"part{number}"
        self._programs = programs

    def prepare(self) -> None:
        """Create the namespace and the link. The bridge must exist."""
        ip("netns", "add", self.namespace)
        ip("link", "add", self._bridge_end, "type", "veth", "peer", "name", _DEVICE, "netns", self.namespace)
        ip("link", "set", self._bridge_end, "master", _BRIDGE, "up")
        ip("-n", self.namespace, "address", "add", f"{self.address}/24", "dev", _DEVICE)
        ip("-n", self.namespace, "link", "set", _DEVICE, "up")
        ip("-n", self.namespace, "link", "set", "lo", "up")

    def command_inside(self, command: list[str]) -> list[str]:
        """Return the command that runs `command` in the namespace."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def cut(self) -> None:
        """Drop all packets, both ways, silently."""
        ip("link", "set", self._bridge_end, "nomaster")

    def drop_incoming(self) -> None:
        """Drop everything that arrives here; packets from here still arrive elsewhere."""
        self._attach_incoming(self._require_programs().drop_all().as_posix())

    def drop_outgoing(self) -> None:
        """Drop everything that is sent from here."""
        self._attach_outgoing(self._require_programs().drop_all().as_posix())

    def drop_incoming_from(self, address: str) -> None:
        """Drop everything that this address sends here."""
        self._attach_incoming(self._require_programs().drop_from(address).as_posix())

    def lose(self, hosts: Sequence[str]) -> None:
        """Send nothing to these hosts, until `find`."""
        for host in hosts:
            ip("-n", self.namespace, "route", "add", "blackhole", f"{host}/32")

    def find(self, hosts: Sequence[str]) -> None:
        """Undo `lose`."""
        for host in hosts:
            ip("-n", self.namespace, "route", "del", "blackhole", f"{host}/32")

    def drop_some(self) -> None:
        """Drop 5% of all packets, each way."""
        program = self._require_programs().drop_some(_LOSS).as_posix()
        self._attach_incoming(program)
        self._attach_outgoing(program)

    def limit_rate(self) -> None:
        """Limit the rate to 1 Mbit/s, each way."""
        run("tc", "qdisc", "add", "dev", self._bridge_end, "root", "tbf", *_SLOW)
        run("tc", "-n", self.namespace, "qdisc", "add", "dev", _DEVICE, "root", "tbf", *_SLOW)

    def restore(self) -> None:
        """Undo everything."""
        ip("link", "set", self._bridge_end, "master", _BRIDGE)
        ip("link", "set", "dev", self._bridge_end, "xdp", "off")
        ip("-n", self.namespace, "link", "set", "dev", _DEVICE, "xdp", "off")
        for end in (("dev", self._bridge_end), ("-n", self.namespace, "dev", _DEVICE)):
            where = list(end[:2]) if end[0] == "-n" else []
            device = end[-1]
            # Deleting a missing qdisc is an error; replacing it and then deleting it never is.
            run("tc", *where, "qdisc", "replace", "dev", device, "root", "pfifo")
            run("tc", *where, "qdisc", "del", "dev", device, "root")

    def _require_programs(self) -> XdpPrograms:
        if self._programs is None:
            raise RuntimeError("this kernel accepts no XDP programs")
        return self._programs

    def _attach_incoming(self, program: str) -> None:
        ip("-n", self.namespace, "link", "set", "dev", _DEVICE, "xdp", "pinned", program)

    def _attach_outgoing(self, program: str) -> None:
        ip("link", "set", "dev", self._bridge_end, "xdp", "pinned", program)
