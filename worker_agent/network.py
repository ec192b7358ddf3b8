"""The network devices of a worker: UCX's for KV, and those between an engine's machines.

UCX binds to devices, not to addresses: its TCP transport listens on the first address of every device in
UCX_NET_DEVICES, on a port from UCX_TCP_PORT_RANGE.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import logging
import os
import re
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tailrace.security.options import exposed

log = logging.getLogger(__name__)

_SIOCGIFCONF: Final = 0x8912
_IFREQ_BYTES: Final = 40
_INTERFACES_MAX: Final = 1024
_IF_INET6: Final = Path("/proc/net/if_inet6")
_INFINIBAND: Final = Path("/sys/class/infiniband")
_DEVICES: Final = "UCX_NET_DEVICES"
_PORTS: Final = "UCX_TCP_PORT_RANGE"

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class BindingError(ValueError):
    """KV transfer cannot be bound as configured; the message says why."""


@dataclass(frozen=True, slots=True)
class PortRange:
    """TCP ports [low, high]. A process uses one per device."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> PortRange:
        """Parse LOW-HIGH. Raise BindingError."""
        match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
        if match is None or not 0 < int(match[1]) <= int(match[2]) < 65536:
            raise BindingError(f"{text!r}: LOW-HIGH expected, two ports, the lower one first")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class Interface:
    """An address of a network device."""

    device: str
    address: IpAddress


def ucx_options(
    host: str,
    ports: PortRange | None,
    environment: Mapping[str, str],
    interfaces: list[Interface],
    rdma: list[str],
) -> dict[str, str]:
    """Return UCX's options (names without UCX_) for transfers bound to `host`.

    `host` is an address or a host name of this machine; a wildcard means every device. Devices set in the
    environment take precedence, so that operators can choose RDMA devices. The devices `rdma`, which need no
    TCP port, are used in addition to the address's own device unless that is the loopback device. Raise
    BindingError.
    """
    options: dict[str, str] = {}
    if ports is not None:
        options["TCP_PORT_RANGE"] = str(ports)
    elif _PORTS in environment:
        options["TCP_PORT_RANGE"] = environment[_PORTS]
    if _DEVICES in environment:
        log.info(
            "%s=%s: KV transfer uses these devices, regardless of --listen", _DEVICES, environment[_DEVICES]
        )
        return options | {"NET_DEVICES": environment[_DEVICES]}
    addresses = _resolved(host)
    if any(address.is_unspecified for address in addresses):
        return options
    loopback = any(address.is_loopback for address in addresses)
    interface = next((i for i in interfaces if i.address in addresses), None)
    if interface is None and loopback:
        interface = next((i for i in interfaces if i.address.is_loopback), None)
    if interface is None:
        raise BindingError(f"KV transfer cannot be bound to {host}: no network device here has that address")
    version = interface.address.version
    first = next(
        i.address for i in interfaces if i.device == interface.device and i.address.version == version
    )
    if first != interface.address:
        log.warning(
            "UCX binds to the first address of %s: %s, not %s", interface.device, first, interface.address
        )
    options["NET_DEVICES"] = ",".join([interface.device, *([] if loopback else rdma)])
    options["TCP_AF_PRIO"] = "inet6,inet" if version == 6 else "inet,inet6"
    return options


def interfaces() -> list[Interface]:
    """Return the addresses of this machine's network devices; each device's first address comes first."""
    return [*_ipv4(), *_ipv6()]


def rdma_devices() -> list[str]:
    """Return the active ports of RDMA devices as UCX names them: mlx5_0:1."""
    ports = []
    for state in sorted(_INFINIBAND.glob("*/ports/*/state")):
        try:
            active = "ACTIVE" in state.read_text()
        except OSError:
            continue
        if active:
            ports.append(f"{state.parents[2].name}:{state.parent.name}")
    return ports


def _resolved(host: str) -> set[IpAddress]:
    name = host.strip("[]")
    if name in ("", "*"):
        return {ipaddress.IPv4Address(0)}
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise BindingError(f"KV transfer cannot be bound to {host}: {error.strerror or error}") from error
    return {ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in infos}


def _ipv4() -> list[Interface]:
    buffer = array.array("B", bytes(_INTERFACES_MAX * _IFREQ_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        answer = fcntl.ioctl(
            query.fileno(), _SIOCGIFCONF, struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        )
    (size,) = struct.unpack_from("i", answer)
    data = buffer.tobytes()[:size]
    addresses = []
    for at in range(0, size, _IFREQ_BYTES):
        # An alias has its device's name with a suffix: eth0:1.
        name = data[at : at + 16].partition(b"\0")[0].decode().partition(":")[0]
        addresses.append(Interface(name, ipaddress.IPv4Address(data[at + 20 : at + 24])))
    return addresses


def _ipv6() -> list[Interface]:
    try:
        lines = _IF_INET6.read_text().splitlines()
    except OSError:
        return []
    fields = [line.split() for line in lines]
    return [Interface(line[5], ipaddress.IPv6Address(bytes.fromhex(line[0]))) for line in fields]


_ADDRESS: Final = "VLLM_HOST_IP"
_DEVICE: Final = "GLOO_SOCKET_IFNAME"


def use_network_of(address: str) -> None:
    """Make vLLM and Gloo use the network device that has this address, unless the environment names others.

    By default, vLLM takes the address of the default route, and Gloo that of the host's name, which is a
    loopback address on many machines. NCCL finds devices by itself.
    """
    os.environ.setdefault(_ADDRESS, address)
    device = next((each.device for each in interfaces() if str(each.address) == address), "")
    if device:
        os.environ.setdefault(_DEVICE, device)


def untrusted_reason(meeting: str) -> str:
    """Return why an engine whose nodes, or data-parallel ranks, meet at HOST:PORT runs only with --insecure;
    empty if it need not."""
    if not exposed([meeting]):
        return ""
    return (
        f"{meeting}: vLLM's connections between the nodes of an engine, or between data-parallel ranks, are "
        "neither encrypted nor authenticated, with certificates or without: give --insecure in a network "
        "that only trusted machines can reach"
    )
