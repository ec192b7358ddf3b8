"""A cluster with certificates that listens on an externally reachable address."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import psutil

from tailrace.local.certificates import (
    ETCD_ROOT,
    ETCD_SERVER,
    OPERATOR,
    certificate_folder,
    span_certificates,
)
from tailrace.local.plan import PartSpec, Plan, Tier
from tailrace.local.ports import LOOPBACK, free_ports
from tailrace.local.state import RunFolder, RunState
from tailrace.security.authority import Authority
from tailrace.security.roles import Identity, Role
from tailrace.service.etcd import etcd_command
from tests.harness.keys import write_key_file
from tests.harness.plans import simulated_plan
from tests.harness.usage import descendants

KEY: Final = "sk-tailrace-strangers-of-the-users"
"""The API key that vLLM's front end and the edge require of users."""
EVERY_ROLE: Final = tuple(role for role in Role if role not in (Role.ETCD, Role.ETCD_ROOT))
"""Those that a certificate of the cluster's own authority can have."""


def exposed_plan(folder: RunFolder, host: str, workers: int) -> Plan:
    """Return the plan of `tailrace up --tls` with simulated engines and an edge, but on `host` in place of
    loopback."""
    plan = simulated_plan(folder, workers, tls=True, etcd=partial(_etcd, folder))
    plan = replace(
        plan,
        parts=[_rebind(part, host) for part in (*plan.parts, _edge(folder, plan))],
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
        *(Identity(role, "stranger") for role in EVERY_ROLE),
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


def edge_of(plan: Plan) -> PartSpec:
    """Return the edge."""
    return next(part for part in plan.parts if part.tier is Tier.EDGE)


def _edge(folder: RunFolder, plan: Plan) -> PartSpec:
    listen, metrics, http = (f"{LOOPBACK}:{port}" for port in free_ports(3))
    keys = write_key_file(folder.data / "keys.json", KEY)
    certificate = certificate_folder(plan.certificates, Role.EDGE.value, "edge")
    command = [sys.executable, "-m", "tailrace", "serve", "edge", "--id", "edge", "--etcd", plan.etcd]
    command += ["--listen", listen, "--metrics", metrics, "--http", http, "--tls", certificate]
    return PartSpec(
        "edge",
        Tier.EDGE,
        [*command, "--api-keys", str(keys)],
        listen,
        environment=span_certificates(certificate),
        http=f"http://{http}",
        role=Role.EDGE.value,
    )


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
