"""A network namespace for one part of the cluster, and what can be done to its only link."""

from __future__ import annotations

from typing import Final

from benchmarks.chaos.xdp import Programs
from benchmarks.etcd_faults.cluster import CLIENTS
from benchmarks.etcd_faults.namespaces import ip, run

_DEVICE: Final = "part"
_BRIDGE: Final = "clients"
_LOSS: Final = 0.05
# A megabyte takes eight seconds.
_SLOW: Final = ("rate", "1mbit", "burst", "16kb", "latency", "200ms")


class Link:
    """From a part's namespace to the bridge of all. Faults are undone by `mend`."""

    def __init__(self, name: str, number: int, programs: Programs | None) -> None:
        """`number`: the last of its address; `programs` None: it can only be cut and slowed down."""
        self.namespace = name
        self.address = f"{CLIENTS}.{number}"
        self._outside = f"part{number}"
        self._programs = programs

    def prepare(self) -> None:
        """Make both. The bridge must be there."""
        ip("netns", "add", self.namespace)
        ip("link", "add", self._outside, "type", "veth", "peer", "name", _DEVICE, "netns", self.namespace)
        ip("link", "set", self._outside, "master", _BRIDGE, "up")
        ip("-n", self.namespace, "address", "add", f"{self.address}/24", "dev", _DEVICE)
        ip("-n", self.namespace, "link", "set", _DEVICE, "up")
        ip("-n", self.namespace, "link", "set", "lo", "up")

    def inside(self, command: list[str]) -> list[str]:
        """The command that runs `command` there."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def cut(self) -> None:
        """Whatever is sent, either way, is dropped silently."""
        ip("link", "set", self._outside, "nomaster")

    def deafen(self) -> None:
        """Nothing arrives here; what is sent from here arrives."""
        self._arriving(self._need().drop_all().as_posix())

    def mute(self) -> None:
        """Nothing that is sent from here arrives."""
        self._leaving(self._need().drop_all().as_posix())

    def deafen_to(self, address: str) -> None:
        """What this address sends does not arrive here."""
        self._arriving(self._need().drop_from(address).as_posix())

    def lose(self) -> None:
        """A twentieth of all packets, each way."""
        program = self._need().drop_some(_LOSS).as_posix()
        self._arriving(program)
        self._leaving(program)

    def slow_down(self) -> None:
        """To one megabit a second, each way."""
        run("tc", "qdisc", "add", "dev", self._outside, "root", "tbf", *_SLOW)
        run("tc", "-n", self.namespace, "qdisc", "add", "dev", _DEVICE, "root", "tbf", *_SLOW)

    def mend(self) -> None:
        """Undo everything."""
        ip("link", "set", self._outside, "master", _BRIDGE)
        ip("link", "set", "dev", self._outside, "xdp", "off")
        ip("-n", self.namespace, "link", "set", "dev", _DEVICE, "xdp", "off")
        for own in (("dev", self._outside), ("-n", self.namespace, "dev", _DEVICE)):
            where = list(own[:2]) if own[0] == "-n" else []
            device = own[-1]
            # Deleting what is not there is an error; replacing and deleting never is.
            run("tc", *where, "qdisc", "replace", "dev", device, "root", "pfifo")
            run("tc", *where, "qdisc", "del", "dev", device, "root")

    def _need(self) -> Programs:
        if self._programs is None:
            raise RuntimeError("no programs for the kernel")
        return self._programs

    def _arriving(self, program: str) -> None:
        ip("-n", self.namespace, "link", "set", "dev", _DEVICE, "xdp", "pinned", program)

    def _leaving(self, program: str) -> None:
        ip("link", "set", "dev", self._outside, "xdp", "pinned", program)
