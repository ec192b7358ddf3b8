"""The console's HTTPS: a certificate for browsers, renewed while it serves."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from unittest.mock import Mock

import pytest
from aiohttp import ClientConnectorCertificateError, ClientSession, TCPConnector

from console_svc.main import serve
from tailrace.cli.admin import AdminAddress
from tailrace.security.authority import Authority
from tailrace.security.https import Https, UnusableCertificate
from tailrace.security.roles import Identity, Role
from tailrace.security.transport import PLAIN
from tests.cli.scripted_admin import serving, small_fleet
from tests.console.test_web import OWN
from tests.ports import free_port
from tests.waiting import WAIT_S


class Certificate:
    """A server's certificate in files, which can be replaced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.chain, self.key = folder / "chain.pem", folder / "key.pem"
        self.issue()

    def issue(self, key: bool = True) -> ssl.SSLContext:
        """Replace the files (without `key`, by a certificate of another key); return what trusts it alone."""
        authority = Authority.create(self._folder / f"authority-{len(list(self._folder.iterdir()))}")
        issued = authority.issue(Identity(Role.ETCD, "console"), hosts=["127.0.0.1"]).folder
        shutil.copy(issued / "tls.crt", self.chain)
        if key:
            shutil.copy(issued / "tls.key", self.key)
        return ssl.create_default_context(cafile=str(issued / "ca.crt"))


@asynccontextmanager
async def console(https: Https) -> AsyncIterator[str]:
    """Serve a console with a token during the block; yield its URL."""
    port = free_port()
    with serving(small_fleet()) as address:
        admin = AdminAddress(address, address, PLAIN)
        task = asyncio.create_task(serve(admin, "127.0.0.1", port, "s3cret-s3cret-s3cret", https))
        try:
            yield f"https://127.0.0.1:{port}"
        finally:
            task.cancel()
            await asyncio.wait([task])


async def _until_answered(url: str, trusts: ssl.SSLContext) -> None:
    """Wait until a new connection finds a certificate that the client trusts."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                async with (
                    ClientSession(connector=TCPConnector(ssl=trusts)) as session,
                    session.get(f"{url}/health") as reply,
                ):
                    assert reply.status == HTTPStatus.OK
                    return
            except OSError:
                await asyncio.sleep(0.05)


async def test_it_serves_https_and_a_new_certificate_when_its_files_change(tmp_path: Path) -> None:
    certificate = Certificate(tmp_path)
    first = certificate.issue()
    https = Https(certificate.chain, certificate.key)
    async with console(https) as url:
        await _until_answered(url, first)
        # A certificate without its key changes nothing.
        other = certificate.issue(key=False)
        https.refresh()
        await _until_answered(url, first)
        second = certificate.issue()
        await _until_answered(url, second)
        for unknown in (first, other):
            async with ClientSession(connector=TCPConnector(ssl=unknown)) as session:
                with pytest.raises(ClientConnectorCertificateError):
                    await session.get(url)


async def test_a_page_that_came_without_tls_cannot_act(tmp_path: Path) -> None:
    certificate = Certificate(tmp_path)
    trusts = certificate.issue()
    async with console(Https(certificate.chain, certificate.key)) as url:
        await _until_answered(url, trusts)
        headers = OWN | {"Authorization": "Bearer s3cret-s3cret-s3cret"}
        async with ClientSession(url, connector=TCPConnector(ssl=trusts)) as session:
            for origin, status in ((url.replace("https", "http"), 403), (url, 200)):
                reply = await session.post(
                    "/api/actions/policy", json={"name": "pascal"}, headers=headers | {"Origin": origin}
                )
                assert reply.status == status
            with pytest.raises(ClientConnectorCertificateError):
                context = ssl.create_default_context(cafile=None)
                await session.get("/", ssl=context)


def test_a_read_that_fails_once_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    certificate = Certificate(tmp_path)
    https = Https(certificate.chain, certificate.key)
    certificate.issue()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", Mock(side_effect=OSError("Input/output error")))
        for _ in range(3):
            https.refresh()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "Input/output error; the previous certificate stays in use" in message
    https.refresh()
    assert https.chain == certificate.chain.read_bytes()


def test_unusable_files(tmp_path: Path) -> None:
    certificate = Certificate(tmp_path)
    certificate.issue(key=False)
    with pytest.raises(UnusableCertificate, match=r"chain\.pem"):
        Https(certificate.chain, certificate.key)
    certificate.key.write_text("none")
    with pytest.raises(UnusableCertificate, match=r"key\.pem"):
        Https(certificate.chain, certificate.key)
