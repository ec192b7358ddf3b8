"""The compose file as plain data, and its services as commands that run on this machine."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import yaml

from tailrace.service.etcd import find_etcd
from tailrace.tiny import MODEL_PATH

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"

_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::?-(?P<default>[^}]*))?\}")


class Healthcheck(TypedDict):
    """The health check of a service."""

    test: list[str]
    start_period: str


class Dependency(TypedDict):
    """A dependency on another service."""

    condition: str


class Build(TypedDict):
    """The build of an image."""

    context: str
    dockerfile: str
    target: str


class ComposeService(TypedDict, total=False):
    """The fields of a service that are read here; all are optional."""

    image: str
    build: Build
    command: list[str]
    environment: dict[str, str]
    depends_on: dict[str, Dependency]
    healthcheck: Healthcheck
    volumes: list[str]
    ports: list[str]
    stop_grace_period: str
    read_only: bool
    cap_drop: list[str]
    security_opt: list[str]
    mem_limit: str
    pids_limit: int


class ComposeFile(TypedDict):
    """The fields of a compose file that are read here."""

    services: dict[str, ComposeService]
    volumes: dict[str, object]


def load_compose(
    name: str = "docker-compose.yml", environment: Mapping[str, str] | None = None
) -> ComposeFile:
    """Return a compose file with its variables replaced from `environment` or by their defaults."""
    text = (DEPLOY / name).read_text()
    loaded: ComposeFile = yaml.safe_load(_interpolate(text, environment or {}))
    assert isinstance(loaded, dict)
    return loaded


def _interpolate(text: str, environment: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        given = environment.get(match["name"])
        if given is None and match["default"] is None:
            raise LookupError(f"${{{match['name']}}} has no default")
        return match["default"] if given is None else given

    return _VARIABLE.sub(value, text)


@dataclass(frozen=True, slots=True)
class LocalService:
    """A compose service to run locally, with loopback hosts, free ports and temporary folders."""

    name: str
    command: list[str]
    health: list[str]
    environment: dict[str, str]
    # Its `depends_on`: condition by service.
    depends_on: dict[str, str]


class LocalCompose:
    """Maps addresses and paths in the containers to this machine."""

    def __init__(self, folder: Path, free_port: Callable[[], int], environment: Mapping[str, str]) -> None:
        services = load_compose(environment=environment)["services"]
        assert isinstance(services, dict)
        self._services = services
        self._folder = folder
        self._free_port = free_port
        self._ports: dict[tuple[str, str], int] = {}

    def port(self, service: str, inside: int) -> int:
        """Return the local port for a port inside a service's container."""
        key = (service, str(inside))
        if key not in self._ports:
            self._ports[key] = self._free_port()
        return self._ports[key]

    def service(self, name: str) -> LocalService:
        """Return a service to run locally: etcd or a Tailrace service."""
        about = self._services[name]
        health = about["healthcheck"]["test"]
        assert health[0] == "CMD", "no shell in the images"
        environment = {
            key: self._local(name, str(value)) for key, value in about.get("environment", {}).items()
        }
        environment["TAILRACE_ADVERTISE"] = "127.0.0.1"
        if "OTEL_EXPORTER_OTLP_ENDPOINT" in environment:
            # There is no collector here; the one of the compose file forwards all spans to the monitor.
            environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{self.port('monitor', 7102)}"
        return LocalService(
            name=name,
            command=self._programs([self._local(name, word) for word in about["command"]]),
            health=self._programs([self._local(name, word) for word in health[1:]]),
            environment=environment,
            depends_on={on: how["condition"] for on, how in about.get("depends_on", {}).items()},
        )

    def _local(self, name: str, word: str) -> str:
        """Return a word of a command, or a value, with local addresses and folders."""
        hosts = "|".join(map(re.escape, sorted(self._services, key=len, reverse=True)))

        def address(match: re.Match[str]) -> str:
            service = name if match["host"] in ("0.0.0.0", "127.0.0.1") else match["host"]
            return f"127.0.0.1:{self.port(service, int(match['port']))}"

        word = re.sub(rf"(?<![\w.-])(?P<host>0\.0\.0\.0|127\.0\.0\.1|{hosts}):(?P<port>\d+)", address, word)
        word = word.replace("/opt/tailrace/tiny-model", str(MODEL_PATH))
        return re.sub(r"/var/lib/(\w+)", lambda found: str(self._volume(name, found[1])), word)

    def _volume(self, service: str, name: str) -> Path:
        folder = self._folder / service / name
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder

    @staticmethod
    def _programs(command: list[str]) -> list[str]:
        """Return the command with Python and scripts of this environment."""
        scripts = Path(sysconfig.get_path("scripts"))
        if command[0] == "python":
            return [sys.executable, *command[1:]]
        if command[0] == "tailrace":
            return [str(scripts / "tailrace"), *command[1:]]
        return (
            [str(find_etcd().parent / command[0]), *command[1:]] if command[0].startswith("etcd") else command
        )


def rust_front_end() -> bool:
    """Return whether vLLM's Rust front end, which starts quickly, is installed."""
    return os.access(Path(sysconfig.get_path("scripts")) / "vllm-rs", os.X_OK)
