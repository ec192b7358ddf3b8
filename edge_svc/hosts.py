"""Look up the IP addresses of front ends that are known by a host name: Envoy takes none in files."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from edge_svc.configuration import host_of, is_literal
from tailrace.bounded import shown

log = logging.getLogger(__name__)

_LOOKUP_S: Final = 5.0
# A lookup that hangs keeps its thread: not those in which bodies are read.
_THREADS: Final = 4


class Hosts:
    """The addresses of host names, as of the last lookup of each that succeeded."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "lookup")
        self._problems: Mapping[str, str] = {}
        self.ips: Mapping[str, Sequence[str]] = {}

    async def find(self, addresses: Iterable[str]) -> bool:
        """Look up the hosts of these, HOST:PORT each; return False if one was not found."""
        hosts = {address: host_of(address) for address in addresses}
        names = sorted({host for host in hosts.values() if host and not is_literal(host)})
        found = dict(zip(names, await asyncio.gather(*map(self._look_up, names)), strict=True))
        self.ips = {name: ips or self.ips.get(name, ()) for name, (ips, _) in found.items()}
        problems = {name: problem for name, (_, problem) in found.items() if problem}
        malformed = {address: "HOST:PORT expected" for address, host in hosts.items() if not host}
        for name, problem in (problems | malformed).items():
            if name not in self._problems:
                log.warning("a front end is registered at %s, which is no address: %s", shown(name), problem)
        self._problems = problems | malformed
        return not problems

    async def _look_up(self, name: str) -> tuple[Sequence[str], str]:
        """Return the addresses, and otherwise why there are none."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_LOOKUP_S):
                found = await loop.run_in_executor(self._threads, _addresses, name)
        except TimeoutError:
            return (), f"no answer within {_LOOKUP_S:g} s"
        # A name that cannot be encoded is a ValueError.
        except (OSError, ValueError) as error:
            return (), str(error)
        return found, "" if found else "it has no address that is the same on all machines"


def _addresses(name: str) -> Sequence[str]:
    """Return the IP addresses of a name, in the resolver's order. Raise OSError or ValueError."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [*dict.fromkeys(str(each[4][0]) for each in found if is_literal(str(each[4][0])))]
