"""A cluster with certificates that listens on an externally reachable address."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import psutil

from tailrace.local.certificates import ETCD_ROOT, ETCD_SERVER, OPERATOR, certificate_folder
from tailrace.local.plan import PartSpec, Plan
from tailrace.local.ports import LOOPBACK
from tailrace.local.state import RunFolder, RunState
from tailrace.security.authority import Authority
from tailrace.security.roles import Identity, Role
from tailrace.service.etcd import etcd_command
from tests.harness.plans import simulated_plan
from tests.harness.usage import descendants

KEY: Final = "sk-of-the-users"
"""The API key that vLLM's front end requires of users."""


def exposed_plan(folder: RunFolder, host: str, workers: int) -> Plan:
    """Return the plan of `tailrace up --tls` with simulated engines, but on `host` in place of loopback."""
    plan = simulated_plan(folder, workers, tls=True, etcd=partial(_etcd, folder))
    plan = replace(
        plan,
        parts=[_rebind(part, host) for part in plan.parts],
        environment={name: value.replace(LOOPBACK, host) for name, value in plan.environment.items()}
        | {"VLLM_API_KEY": KEY},
        admin=plan.admin.replace(LOOPBACK, host),
        http=plan.http.replace(LOOPBACK, host),
        etcd=plan.etcd.replace(LOOPBACK, host),
    )
    authority = Authority.create(Path(plan.certificates))
    for part in plan.parts:
        authority.issue(Identity(Role(part.role), part.name), hosts=[host])
    for identity in (
        OPERATOR,
        ETCD_ROOT,
        Identity(Role.TELEMETRY, "stranger"),
        Identity(Role.VIEWER, "stranger"),
    ):
        authority.issue(identity)
    return plan


def listening_ports(state: RunState) -> dict[int, str]:
    """Return every TCP port of the cluster, and the part that listens there."""
    owners = {pid: part.name for part in state.parts for pid in descendants(part.identity.pid)}
    return {
        connection.laddr.port: owners[connection.pid]
        for connection in psutil.net_connections("tcp")
        if connection.laddr and connection.status == psutil.CONN_LISTEN and connection.pid in owners
    }


def _etcd(folder: RunFolder, port: int) -> list[str]:
    certificates = Path(
        certificate_folder(str(folder.data / "certs"), ETCD_SERVER.role.value, ETCD_SERVER.name)
    )
    return etcd_command(folder.data / "etcd", port, certificates)


def _rebind(part: PartSpec, host: str) -> PartSpec:
    return replace(
        part,
        command=[argument.replace(LOOPBACK, host) for argument in part.command],
        address=part.address.replace(LOOPBACK, host),
        http=part.http.replace(LOOPBACK, host),
    )
