"""The network between an engine's machines: which device it uses, and who else may be in it."""

from __future__ import annotations

import os
from typing import Final

from tailrace.security.options import exposed
from worker_agent.kv.binding import interfaces

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
