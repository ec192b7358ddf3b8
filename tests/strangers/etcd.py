"""Try etcd's methods as each role and as nobody, on an etcd of its own, and print what was refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import grpc
import psutil
from rich.console import Console
from rich.table import Table

from tailrace.address import parse_endpoints
from tailrace.security.authority import Authority
from tailrace.security.credentials import read_credentials
from tailrace.security.folder import CredentialFolder
from tailrace.security.roles import MEMBERS, Identity, Role
from tailrace.security.transport import TlsTransport
from tailrace.store.client import EtcdClient
from tailrace.store.etcd_roles import apply_rights, etcd_rights
from tests.harness.local_etcd import LocalEtcd, local_etcd
from tests.strangers.etcd_calls import (
    METHODS,
    Caller,
    EtcdCall,
    Outcome,
    call_etcd,
    checks_all,
    etcd_calls,
    is_refusal,
    outcome,
    prepare,
    version_of,
)

_CLUSTER: Final = "default"
# Of root's calls.
_TRIES: Final = 3
# Users have no passwords, so that root cannot log in by one either.
_REFUSED_TO_ALL: Final = "/etcdserverpb.Auth/Authenticate"


@dataclass(frozen=True, slots=True)
class Tried:
    """How one caller's calls at one port ended."""

    caller: str
    port: str
    ends: Mapping[EtcdCall, str]
    outcomes: Mapping[EtcdCall, Outcome]

    def calls(self, outcome: Outcome) -> list[EtcdCall]:
        """Return the calls that ended so."""
        return [call for call, found in self.outcomes.items() if found is outcome]


@dataclass(frozen=True, slots=True)
class EtcdTried:
    """How all calls ended."""

    version: str
    all_checked: bool
    callers: list[Tried]
    # That root cannot make, so that a refusal proves nothing.
    meaningless: list[EtcdCall]

    @property
    def violations(self) -> int:
        """Return the number of calls that did not end as they must."""
        wrong = (Outcome.IMPROPER, Outcome.MISSING)
        return len(self.meaningless) + sum(len(tried.calls(end)) for tried in self.callers for end in wrong)

    def figures(self) -> dict[str, object]:
        """Return what is saved."""
        return {
            "version": self.version,
            "methods": len(METHODS),
            "by_caller": {
                f"{tried.caller}, {tried.port}": {
                    end.value: [str(call) for call in tried.calls(end)]
                    for end in Outcome
                    if end is not Outcome.REFUSED
                }
                | {Outcome.REFUSED.value: len(tried.calls(Outcome.REFUSED))}
                for tried in self.callers
            },
        }


async def try_etcd(folder: Path) -> EtcdTried:
    """Start an etcd with certificates and roles in a folder, and make every call as everybody."""
    authority = Authority.create(folder / "etcd-certs")
    other = Authority.create(folder / "other-certs")
    server = authority.issue(Identity(Role.ETCD, "etcd"), hosts=["127.0.0.1"]).folder
    root_folder = authority.issue(Identity(Role.ETCD_ROOT, "local")).folder
    async with local_etcd(folder / "etcd-alone", tls=server) as etcd:
        transport = TlsTransport(CredentialFolder(root_folder, frozenset({Role.ETCD_ROOT})))
        client = EtcdClient(parse_endpoints([etcd.endpoint]), transport)
        try:
            await apply_rights(client, etcd_rights(_CLUSTER), _CLUSTER)
        finally:
            await client.close()
        return await asyncio.to_thread(_try_all, authority, other, etcd)


def _try_all(authority: Authority, other: Authority, etcd: LocalEtcd) -> EtcdTried:
    trusted = (authority.folder / "etcd-ca.crt").read_bytes()
    root = _credentials(authority, Role.ETCD_ROOT, trusted, separate=True)
    version = version_of(etcd.endpoint, root)
    all_checked = checks_all(version)
    calls = etcd_calls(_CLUSTER)
    found: list[Tried] = []
    peer_port = _peer_port(etcd)
    for caller in _callers(authority, other, trusted):
        ports = {"clients": etcd.endpoint}
        # There etcd's members call each other.
        if caller.role is not Role.ETCD:
            ports["peers"] = f"127.0.0.1:{peer_port}"
        for port, address in ports.items():
            prepare(etcd.endpoint, root, _CLUSTER)
            ends = call_etcd(address, caller, calls)
            at_port = caller if port == "clients" else replace(caller, is_trusted=False)
            outcomes = {
                call: outcome(call, at_port, end, all_checked=all_checked) for call, end in ends.items()
            }
            found.append(Tried(caller.name, port, ends, outcomes))
    meaningless = [call for call in calls if call.method != _REFUSED_TO_ALL]
    by_root = Caller("root", root, Role.ETCD_ROOT, is_trusted=True)
    # On a slow machine, etcd may be busy with the call before, such as one for another leader.
    for _ in range(_TRIES):
        prepare(etcd.endpoint, root, _CLUSTER)
        meaningless = [
            call for call, end in call_etcd(etcd.endpoint, by_root, meaningless).items() if is_refusal(end)
        ]
    return EtcdTried(".".join(map(str, version)), all_checked, found, meaningless)


def _callers(authority: Authority, other: Authority, trusted: bytes) -> Iterator[Caller]:
    yield Caller("nobody, in the clear", None)
    yield Caller("nobody, TLS without a certificate", grpc.ssl_channel_credentials(trusted))
    stranger = _credentials(other, Role.ETCD_ROOT, trusted, separate=True)
    yield Caller("root of another authority", stranger, Role.ETCD_ROOT)
    for role in Role:
        if role not in (Role.ETCD, Role.ETCD_ROOT):
            own = _credentials(authority, role, trusted, separate=False)
            yield Caller(f"{role.value}, for the cluster", own, role)
        if role in MEMBERS or role is Role.ETCD:
            own = _credentials(authority, role, trusted, separate=True)
            yield Caller(role.value, own, role, is_trusted=True)


def _credentials(
    authority: Authority, role: Role, trusted: bytes, *, separate: bool
) -> grpc.ChannelCredentials:
    """Return a role's credentials: those for etcd (`separate`), if it has such, or those for the cluster."""
    hosts = ["127.0.0.1"] if role is Role.ETCD else []
    own = read_credentials(authority.issue(Identity(role, "stranger"), hosts=hosts).folder)
    chosen = own.etcd if separate and own.etcd is not None else own
    return replace(chosen, authorities=trusted).for_channels()


def _peer_port(etcd: LocalEtcd) -> int:
    assert etcd.pid is not None
    listening = {
        each.laddr.port
        for each in psutil.Process(etcd.pid).net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }
    (port,) = listening - {etcd.port}
    return port


def print_etcd(console: Console, tried: EtcdTried) -> None:
    """Print what was refused by caller, and what was not."""
    calls = len(tried.callers[0].ends)
    table = Table(title=f"etcd {tried.version}: {calls} requests to {len(METHODS)} methods by each caller")
    columns = ("caller", "port", "refused", "by design", "unchecked", "improper")
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:2] else "right")
    for each in tried.callers:
        counts = Counter(each.outcomes.values())
        improper = counts[Outcome.IMPROPER] + counts[Outcome.MISSING]
        ends = (Outcome.REFUSED, Outcome.ALLOWED, Outcome.UNCHECKED)
        table.add_row(each.caller, each.port, *(str(counts[end]) for end in ends), str(improper))
    console.print(table)
    unchecked = {
        f"{call.method.removeprefix('/etcdserverpb.')}{' (nested)' if 'nested' in call.what else ''}"
        for each in tried.callers
        for call in each.calls(Outcome.UNCHECKED)
    }
    if unchecked:
        console.print(
            "this etcd checks no user, of those with a certificate of its authority, on: "
            + ", ".join(sorted(unchecked))
        )
    for each in tried.callers:
        for end in (Outcome.IMPROPER, Outcome.MISSING):
            for call in each.calls(end):
                console.print(f"[red]{end}[/red] {each.caller} ({each.port}): {call}: {each.ends[call]}")
    for call in tried.meaningless:
        console.print(f"[red]refused to root, too[/red] {call}")
    console.print(f"etcd: {tried.violations} improper")
