"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp

from tests.waiting import WAIT_S

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)


class Page:
    """One page. `problems`: exceptions and errors in its log, such as what its policy refused to load."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def read(self) -> None:
        """Read what the browser says, until it ends."""
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                self._replies.pop(said["id"]).set_result(said)
            elif said["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(said["params"]["exceptionDetails"]))
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.problems.append(str(said["params"]["entry"]))

    async def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        said = await asyncio.wait_for(reply, WAIT_S)
        assert "error" not in said, said
        result: dict[str, Any] = said["result"]
        return result

    async def evaluate(self, script: str) -> Any:
        """Return the value of an expression; of a promise, what it is fulfilled with."""
        result = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        await self.evaluate(
            f"new Promise((done) => {{ const look = () => ({condition}) ? done() : setTimeout(look, 50);"
            " look(); })"
        )

    async def open(self, url: str) -> None:
        """Load a page, and wait until it has been laid out."""
        await self.call("Page.navigate", url=url)
        await self.wait("document.readyState === 'complete'")

    async def key(self, key: str, code: int) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text
            )

    async def write(self, text: str) -> None:
        """Replace what the focused field holds."""
        await self.evaluate("document.activeElement.select()")
        await self.call("Input.insertText", text=text)

    async def scheme(self, scheme: str) -> None:
        """Prefer `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def picture(self) -> bytes:
        """Return what the page looks like, as PNG."""
        result = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(result["data"])


@asynccontextmanager
async def browsing(width: int = 1280, height: int = 800) -> AsyncIterator[Page]:
    """Run a browser during the block; yield an empty page."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=DEVNULL)
        try:
            port = await _port(Path(profile), process)
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{port}/json/list") as listing,
            ):
                target = next(t for t in await listing.json() if t["type"] == "page")
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    reading = asyncio.create_task(page.read())
                    for domain in ("Page", "Runtime", "Log"):
                        await page.call(f"{domain}.enable")
                    await page.call(
                        "Emulation.setDeviceMetricsOverride",
                        width=width,
                        height=height,
                        deviceScaleFactor=1,
                        mobile=False,
                    )
                    yield page
                await reading
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), WAIT_S)


async def _port(profile: Path, process: Process) -> int:
    """Return the port on which the browser listens."""
    file = profile / "DevToolsActivePort"
    async with asyncio.timeout(WAIT_S):
        while not file.exists() or not file.read_text().strip():
            assert process.returncode is None, "the browser ended"
            await asyncio.sleep(0.05)
    return int(file.read_text().split()[0])
