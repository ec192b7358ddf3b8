"""Network and mount namespaces for this command, so that it can partition networks and fill disks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.waiting import WAIT_S

_INSIDE: Final = "TAILRACE_ETCD_FAULTS_INSIDE"
_SEPARATE: Final = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")

UNSUPPORTED: Final = 3
"""Exit status of a command that cannot have the namespaces that it needs."""


class NamespacesUnavailable(RuntimeError):
    """Namespaces cannot be created on this machine; the message says what is missing."""


def is_inside() -> bool:
    """Return whether this process runs in namespaces of its own."""
    return _INSIDE in os.environ


def command_in_namespaces(command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` in new network, mount and process namespaces, with root's rights
    there.

    Killing it kills all processes inside. Raise NamespacesUnavailable if namespaces cannot be created.
    """
    # Without root, also use a user namespace.
    for options in ([], ["--user", "--map-root-user"]):
        unshare = ["unshare", *options, *_SEPARATE]
        bridge = "ip link add tr0 type bridge && mount -t tmpfs tmpfs /run && ip netns add tr"
        try:
            attempt = subprocess.run(
                [*unshare, "sh", "-c", f"mkdir -p /run && {bridge}"], capture_output=True, timeout=WAIT_S
            )
        except FileNotFoundError as error:
            raise NamespacesUnavailable("needs unshare (util-linux) and ip (iproute2)") from error
        if attempt.returncode == 0:
            return [*unshare, "env", f"{_INSIDE}=1", *command]
    reason = attempt.stderr.decode().strip()
    raise NamespacesUnavailable(f"cannot make network namespaces (root, or user namespaces): {reason}")


async def figures_of(*command: str) -> tuple[Any, str]:
    """Run a command that gives itself namespaces; return the figures that it prints, and its error output.

    Raise NamespacesUnavailable if it cannot have them.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        output, errors = await process.communicate()
    finally:
        # Its child processes end with it.
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if process.returncode == UNSUPPORTED:
        raise NamespacesUnavailable(errors.decode().strip())
    assert output, errors.decode()
    return json.loads(output), errors.decode()


def prepare() -> None:
    """Set up this process's namespaces: loopback, and a private folder for the names of namespaces."""
    ip("link", "set", "lo", "up")
    run("mount", "-t", "tmpfs", "tmpfs", "/run")


def ip(*arguments: str) -> None:
    """Run `ip`. Raise RuntimeError with its output if it fails."""
    run("ip", *arguments)


def run(*command: str) -> str:
    """Run a command; return its output. Raise RuntimeError with its error output if it fails."""
    completed = subprocess.run(command, capture_output=True, text=True)
    if completed.returncode:
        raise RuntimeError(f"{' '.join(command)}: {completed.stderr.strip()}")
    return completed.stdout


def fill(folder: Path) -> None:
    """Use up all free space on the folder's file system."""
    with (folder / "filler").open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
