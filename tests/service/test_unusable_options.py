"""A service that cannot start prints one line with the option and the address or file."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import pytest

from tests.harness.local_etcd import local_etcd
from tests.waiting import WAIT_S

COMMANDS = [
    ("scheduler", "--listen"),
    ("monitor", "--metrics"),
    ("frontend --front none --http 127.0.0.1:0", "--metrics"),
    ("worker --engine simulated", "--listen"),
    ("worker --engine simulated", "--stream-port"),
]


async def _run_service(*arguments: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tailrace", "serve", *arguments, stderr=asyncio.subprocess.PIPE
    )
    try:
        _, log = await asyncio.wait_for(process.communicate(), WAIT_S)
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode, log.decode()


@pytest.mark.parametrize(
    "commands",
    [
        COMMANDS,
        # The default engine: the port is checked before a model is loaded, but vLLM is imported.
        pytest.param([("worker", "--stream-port")], marks=pytest.mark.slow),
    ],
    ids=["all kinds", "vLLM"],
)
async def test_the_error_names_the_option_and_the_address(
    tmp_path: Path, commands: list[tuple[str, str]]
) -> None:
    async with local_etcd(tmp_path / "etcd") as etcd:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            address = f"127.0.0.1:{port}"
            runs = [
                _run_service(
                    *service.split(),
                    f"--etcd={etcd.endpoint}",
                    f"{option}={port if option == '--stream-port' else address}",
                )
                for service, option in commands
            ]
            ended = await asyncio.gather(*runs)
    for (_, option), (status, log) in zip(commands, ended, strict=True):
        assert status == 1, log
        assert log.splitlines()[-1].endswith(f"{option}: cannot listen on {address}: the port is taken"), log
        assert "Traceback" not in log


async def test_the_error_names_the_option_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    commands = [
        ("migration", "--journal", f"{file}/journal", f"{file}: File exists"),
        ("scheduler", "--audit-log", f"{file}/audit", f"{file}/audit: Not a directory"),
    ]
    async with local_etcd(tmp_path / "etcd") as etcd:
        runs = [
            _run_service(service, f"--etcd={etcd.endpoint}", option, value)
            for service, option, value, _ in commands
        ]
        ended = await asyncio.gather(*runs)
    for (_, option, _, problem), (status, log) in zip(commands, ended, strict=True):
        assert status == 1, log
        assert log.splitlines()[-1].endswith(f"{option}: {problem}"), log
        assert "Traceback" not in log
