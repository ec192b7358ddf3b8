"""Run in a mount namespace: check that a member whose name moves to another address is found there.

    unshare --mount python -m tests.store.moved_member HOSTS PORT ETCD

HOSTS, an empty file, replaces /etc/hosts.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.store.store import Store, StoreUnavailable
from tests.store.etcd_proxy import etcd_proxy
from tests.waiting import WAIT_S

NAME = "etcd-of-a-test"


async def main(hosts: Path, port: str, etcd: str) -> None:
    """Point the name to a first proxy, connect, stop the proxy, and point the name to a second one."""
    await asyncio.to_thread(subprocess.run, ["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
    await asyncio.to_thread(hosts.write_text, f"127.0.0.2 {NAME}\n")
    async with etcd_proxy(etcd, f"127.0.0.2:{port}"):
        store = await Store.connect([f"{NAME}:{port}"], "moved")
        await store.put("policy", b"before")
    await asyncio.to_thread(hosts.write_text, f"127.0.0.3 {NAME}\n")
    async with etcd_proxy(etcd, f"127.0.0.3:{port}") as second, asyncio.timeout(WAIT_S):
        while not second.calls:
            try:
                await store.put("policy", b"after")
            except StoreUnavailable as error:
                print(error)
                await asyncio.sleep(0.1)
        assert await store.get("policy") == b"after"
        await store.close()


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tailrace.store.client._DEADLINE_S", WAIT_S)
        asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
