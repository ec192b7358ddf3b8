"""Run Envoy as a supervised child, and keep the files that it follows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector

from edge_svc.configuration import (
    Endpoints,
    clusters,
    endpoints,
    endpoints_file,
    secrets,
    users_secret,
)
from tailrace.security.credentials import Credentials
from tailrace.security.https import Https
from tailrace.service.child import Child

_START_S: Final = 30.0
_POLL_S: Final = 0.1
_CALL_S: Final = 5.0


class ProxyFailed(OSError):
    """Envoy does not run; the message says why, as far as it is known."""


class Proxy:
    """Envoy, and the folder of its files."""

    def __init__(self, executable: Path, folder: Path, threads: int) -> None:
        """`threads`: of Envoy that serve connections."""
        self._executable = executable
        self._folder = folder
        self._threads = threads
        self._written: dict[Path, str] = {}
        self._known: dict[str, Endpoints] = {}
        self._tls = False

    def route(
        self, every: Sequence[Endpoints], ips: Mapping[str, Sequence[str]] = MappingProxyType({})
    ) -> None:
        """Send requests to these from now on. Streams on others go on. Raise OSError.

        `ips`: the addresses of host names. A cluster stays, without endpoints, when its last front end has
        gone: its requests get 503.
        """
        now = {each.cluster: each for each in every}
        self._known = {name: now.get(name, Endpoints(name, ())) for name in (*self._known, *now)}
        for each in self._known.values():
            self._write(endpoints_file(each.cluster, self._folder), endpoints(each, ips))
        content = clusters([*self._known.values()], self._folder, tls=self._tls)
        self._write(self._folder / "clusters.json", content)

    def present(self, own: Credentials) -> None:
        """Show this certificate to front ends from now on, and trust its authorities. Raise OSError."""
        self._tls = True
        texts = (_text(each) for each in (own.certificate, own.key, own.authorities))
        for name, content in secrets(*texts).items():
            self._write(self._folder / name, content)

    def present_to_users(self, https: Https) -> None:
        """Show this certificate to users from now on. Raise OSError."""
        for name, content in users_secret(_text(https.chain), _text(https.key)).items():
            self._write(self._folder / name, content)

    @asynccontextmanager
    async def running(self, bootstrap: Mapping[str, Any]) -> AsyncIterator[Child]:
        """Run Envoy during the block; stop it at the end. Raise ProxyFailed if it does not start."""
        file = self._folder / "envoy.json"
        self._write(file, bootstrap)
        command = [str(self._executable), "--config-path", str(file), "--concurrency", str(self._threads)]
        command += ["--log-level", "warning", "--disable-hot-restart", "--drain-strategy", "immediate"]
        # Lines about requests that have ended are written at once (ends.py).
        command += ["--file-flush-min-size-kb", "0"]
        child = await Child.launch(command, {}, ())
        try:
            await self._until_live(child)
            yield child
        finally:
            await child.stop()

    async def drain(self) -> None:
        """Accept no more connections, end idle ones, and wait until the last response has ended."""
        async with self._admin() as admin:
            await _post(admin, "/healthcheck/fail")
            await _post(admin, "/drain_listeners")
            while await self._active(admin):  # noqa: ASYNC110 - Envoy has no event for it
                await asyncio.sleep(_POLL_S)

    async def _active(self, admin: ClientSession) -> int:
        async with admin.get("http://envoy/stats?filter=^http.users.downstream_rq_active$") as reply:
            return int((await reply.text()).strip().rpartition(" ")[2] or 0)

    async def _until_live(self, child: Child) -> None:
        try:
            async with asyncio.timeout(_START_S), self._admin() as admin:
                while True:
                    if child.status is not None:
                        raise ProxyFailed(f"Envoy ended with status {child.status}; its log says why")
                    with suppress(ClientError):
                        async with admin.get("http://envoy/ready") as reply:
                            if reply.status == 200:
                                return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise ProxyFailed(f"Envoy was not ready within {_START_S:g} s") from None

    def _admin(self) -> ClientSession:
        connector = UnixConnector(str(self._folder / "admin.sock"))
        return ClientSession(connector=connector, timeout=ClientTimeout(_CALL_S))

    def _write(self, path: Path, content: Mapping[str, Any]) -> None:
        """Replace the file if its content has changed: Envoy follows renames."""
        text = json.dumps(content)
        if self._written.get(path) == text:
            return
        partial = path.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(path)
        self._written[path] = text


def _text(pem: bytes) -> str:
    """Return the text of a file whose comments may have any encoding."""
    return pem.decode(errors="replace")


async def _post(admin: ClientSession, path: str) -> None:
    async with admin.post(f"http://envoy{path}"):
        pass
