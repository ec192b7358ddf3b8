"""Selection of UCX's devices and ports."""

from __future__ import annotations

import ipaddress
import socket

import psutil
import pytest

from worker_agent.network import BindingError, Interface, PortRange, interfaces, ucx_options

LOOPBACK = Interface("lo", ipaddress.ip_address("127.0.0.1"))
ETHERNET = Interface("eth0", ipaddress.ip_address("10.0.0.5"))
SECOND = Interface("eth0", ipaddress.ip_address("10.0.0.6"))
SIXTH = Interface("eth1", ipaddress.ip_address("fd00::5"))
HERE = [LOOPBACK, ETHERNET, SECOND, SIXTH]
RDMA = ["mlx5_0:1"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_loopback_uses_only_the_loopback_device(host: str) -> None:
    assert ucx_options(host, None, {}, HERE, RDMA)["NET_DEVICES"] == "lo"


def test_address_selects_its_device_and_rdma() -> None:
    options = ucx_options("10.0.0.5", PortRange(7200, 7299), {}, HERE, RDMA)
    assert options["NET_DEVICES"] == "eth0,mlx5_0:1"
    assert options["TCP_PORT_RANGE"] == "7200-7299"
    assert ucx_options("[fd00::5]", None, {}, HERE, RDMA)["TCP_AF_PRIO"] == "inet6,inet"


def test_secondary_address_of_a_device_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert ucx_options("10.0.0.6", None, {}, HERE, [])["NET_DEVICES"] == "eth0"
    assert "10.0.0.5" in caplog.text


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "*"])
def test_wildcard_selects_every_device(host: str) -> None:
    assert "NET_DEVICES" not in ucx_options(host, None, {}, HERE, RDMA)


def test_environment_takes_precedence() -> None:
    environment = {"UCX_NET_DEVICES": "mlx5_1:1", "UCX_TCP_PORT_RANGE": "1-2"}
    options = ucx_options("10.0.0.5", None, environment, HERE, RDMA)
    assert options == {"NET_DEVICES": "mlx5_1:1", "TCP_PORT_RANGE": "1-2"}
    assert ucx_options("10.0.0.5", PortRange(3, 4), environment, HERE, RDMA)["TCP_PORT_RANGE"] == "3-4"


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(BindingError, match="no network device"):
        ucx_options("192.0.2.77", None, {}, HERE, RDMA)


@pytest.mark.parametrize("text", ["", "7200", "7299-7200", "0-5", "1-70000", "a-b"])
def test_invalid_port_range_is_refused(text: str) -> None:
    with pytest.raises(BindingError):
        PortRange.parse(text)
    assert str(PortRange.parse("7200-7299")) == "7200-7299"


def test_own_addresses_are_found() -> None:
    known = {
        (name, str(ipaddress.ip_address(each.address.partition("%")[0])))
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6)
    }
    assert {(each.device, str(each.address)) for each in interfaces()} == known
