"""Network and mount namespaces of this command's own, so that it can cut a network and fill a disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_INSIDE: Final = "TAILRACE_ETCD_FAULTS_INSIDE"
_SEPARATE: Final = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


class NoNamespaces(RuntimeError):
    """This machine does not let us make namespaces; the message says what is missing."""


def inside() -> bool:
    """Whether this process has namespaces of its own."""
    return _INSIDE in os.environ


def inside_command(command: Sequence[str]) -> list[str]:
    """The command that runs `command` in new network, mount and process namespaces, with what root may do
    there.

    Whoever kills it kills all that was started inside. Raises NoNamespaces.
    """
    # Without root, in a user namespace as well.
    for options in ([], ["--user", "--map-root-user"]):
        unshare = ["unshare", *options, *_SEPARATE]
        bridge = "ip link add tr0 type bridge && mount -t tmpfs tmpfs /run && ip netns add tr"
        try:
            tried = subprocess.run(
                [*unshare, "sh", "-c", f"mkdir -p /run && {bridge}"], capture_output=True, timeout=10
            )
        except FileNotFoundError as error:
            raise NoNamespaces("needs unshare (util-linux) and ip (iproute2)") from error
        if tried.returncode == 0:
            return [*unshare, "env", f"{_INSIDE}=1", *command]
    reason = tried.stderr.decode().strip()
    raise NoNamespaces(f"cannot make network namespaces (root, or user namespaces): {reason}")


def prepare() -> None:
    """Set this process's own namespaces up: loopback, and a private place for names of namespaces."""
    ip("link", "set", "lo", "up")
    run("mount", "-t", "tmpfs", "tmpfs", "/run")


def ip(*arguments: str) -> None:
    """Run `ip`. Raises RuntimeError with what it said."""
    run("ip", *arguments)


def run(*command: str) -> str:
    """Run a command; its output. Raises RuntimeError with what it said."""
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)}: {ended.stderr.strip()}")
    return ended.stdout


def fill(folder: Path) -> None:
    """Leave no byte free on the folder's filesystem."""
    with (folder / "filler").open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
