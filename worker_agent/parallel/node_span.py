"""Which machines an engine spans, by vLLM's `nnodes`, `node_rank`, `master_addr` and `master_port`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tailrace.address import format_address
from worker_agent.engine.errors import EngineSettingError

NODES: Final = "nnodes"
NODE: Final = "node_rank"
ADDRESS: Final = "master_addr"
PORT: Final = "master_port"
_TENSOR: Final = "tensor_parallel_size"
_STAGES: Final = "pipeline_parallel_size"


@dataclass(frozen=True, slots=True)
class NodeSpan:
    """The machines of one engine. `node`: this one's number; node 0, the worker, is reached at `address`."""

    nodes: int
    node: int
    # Number of ranks on each machine.
    local_ranks: int
    address: str
    port: int

    @property
    def meeting(self) -> str:
        """HOST:PORT where the nodes join the worker."""
        return format_address(self.address, self.port)

    def of_rank(self, rank: int) -> int:
        """Return the node that runs this rank."""
        return rank // self.local_ranks


def parallel_size(arguments: Mapping[str, object], name: str) -> int:
    """Return a parallel size from vLLM's engine arguments. Raises EngineSettingError."""
    size = arguments.get(name, 1)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise EngineSettingError(f"{name} {size!r}: a number of devices expected")
    return size


def read_span(arguments: Mapping[str, object]) -> NodeSpan | None:
    """Return the machines that vLLM's engine arguments name, or None for an engine on this machine alone.

    Raises EngineSettingError, naming the setting, for values that do not fit together.
    """
    nodes = _number(arguments, NODES, 1, 1, "a number of machines")
    node = _number(arguments, NODE, 0, 0, "the number of a machine, from 0 on")
    if nodes == 1:
        if node:
            raise EngineSettingError(f"{NODE} {node}: without {NODES}, the engine is on this machine alone")
        return None
    if node >= nodes:
        raise EngineSettingError(f"{NODE} {node}: with {NODES} {nodes}, nodes are 0 to {nodes - 1}")
    tensor, stages = parallel_size(arguments, _TENSOR), parallel_size(arguments, _STAGES)
    if tensor * stages % nodes:
        ranks = f"{_TENSOR} {tensor} x {_STAGES} {stages}"
        raise EngineSettingError(
            f"{NODES} {nodes}: does not divide {ranks}, and every node has as many ranks"
        )
    address = arguments.get(ADDRESS)
    if not isinstance(address, str) or not address:
        raise EngineSettingError(
            f"{NODES} {nodes}: {ADDRESS} is not set: the address of the worker's machine for the other nodes"
        )
    port = _number(arguments, PORT, None, 1, f"a port of {address} for the other nodes")
    if port > 65535:
        raise EngineSettingError(f"{PORT} {port}: a port is at most 65535")
    return NodeSpan(nodes, node, tensor * stages // nodes, address.strip("[]"), port)


def worker_span(arguments: Mapping[str, object]) -> NodeSpan | None:
    """Return `read_span` of a worker's engine. Raises EngineSettingError also if it is not node 0."""
    span = read_span(arguments)
    if span is not None and span.node:
        raise EngineSettingError(
            f"{NODE} {span.node}: a worker is node 0; another machine runs `tailrace serve ranks --worker "
            f"{span.meeting} --node {span.node}`"
        )
    return span


def _number(arguments: Mapping[str, object], name: str, default: int | None, least: int, what: str) -> int:
    value = arguments.get(name, default)
    if value is None:
        raise EngineSettingError(f"{NODES} {arguments[NODES]}: {name} is not set: {what}")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise EngineSettingError(f"{name} {value!r}: {what} expected")
    return value
