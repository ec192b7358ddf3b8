"""`tailrace render`: make one folder for each host of a fleet, which is copied there as it is."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Final

import click

from tailrace.cli.certs import folder_option
from tailrace.cli.errors import CliError, UsageProblem, file_errors
from tailrace.cli.fleet_file import FleetFile, file_option, options_of, read_fleet_file
from tailrace.cli.output import note
from tailrace.fleet.file import Fleet, FleetError
from tailrace.fleet.folders import (
    CERTIFICATES,
    KEYS,
    PROMETHEUS,
    SCRAPER,
    Files,
    HostFolder,
    compose,
    control_first,
    processes,
    prometheus,
    systemd,
)
from tailrace.fleet.hosts import control_hosts, endpoints
from tailrace.local.certificates import ETCD_ROOT, OPERATOR, certificate_folder
from tailrace.security.authority import Authority, AuthorityProblem, Issued
from tailrace.security.credentials import AUTHORITIES
from tailrace.security.roles import Identity

_ALERTS: Final = Path(__file__).parent.parent / "fleet" / "alerts.yml"
# A certificate that ends sooner is issued again.
_LEFT: Final = datetime.timedelta(days=30)


@click.command(epilog="Example: tailrace render systemd -f fleet.yaml --out hosts")
@click.argument("kind", type=click.Choice(["systemd", "compose", "processes"]))
@file_option(required=True)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("hosts"),
    show_default=True,
    metavar="DIR",
    help="Where the hosts' folders are written.",
)
@folder_option
def render(kind: str, file: Path, out: Path, folder: Path) -> None:
    """Make a folder for each host: units, containers or processes, certificates, firewall, and start.sh.

    Copy each to its host and run its start.sh there. After a change of the file, do the same again: start.sh
    restarts what has changed. Prometheus's configuration and alerts are beside them.
    """
    source = read_fleet_file(file)
    fleet = source.fleet
    if not fleet.hosts:
        raise UsageProblem(f"{file}: hosts: there are none; tailrace up -f starts it on one machine")
    keys = source.beside(fleet.keys) if fleet.keys else None
    if keys is not None and not keys.is_file():
        raise UsageProblem(f"{keys}: no such file; tailrace keys make NAME --file {keys} makes it")
    options = options_of(source)
    try:
        with file_errors(AuthorityProblem):
            issuer = _Issuer.of(folder) if fleet.tls else None
            for host in fleet.hosts:
                match kind:
                    case "systemd":
                        made = systemd(fleet, options, host)
                    case "compose":
                        made = compose(fleet, options, host)
                    case _:
                        made = processes(fleet, options, host)
                _write(out / host, made, keys)
                if issuer is not None:
                    _certify(issuer, out / host, made.identities, [fleet.hosts[host].address])
            _write(out / PROMETHEUS, HostFolder(prometheus(fleet, options, _ALERTS.read_text()), []), None)
            if issuer is not None:
                _certify(issuer, out / PROMETHEUS, [SCRAPER], [])
                for operator in (OPERATOR, ETCD_ROOT):
                    issuer.issue(operator, [])
    except FleetError as error:
        raise CliError(f"{file}: {error}") from error
    click.echo("\n".join(_next_steps(kind, source, out, folder)))


def _write(folder: Path, made: HostFolder, keys: Path | None) -> None:
    """Write a host's folder anew; its certificates stay."""
    folder.mkdir(parents=True, exist_ok=True)
    # Flags and environment may have secrets.
    folder.chmod(0o700)
    for old in (*folder.glob("units/*"), folder / KEYS):
        old.unlink(missing_ok=True)
    _write_files(folder, made.files)
    if keys is not None and made.needs_keys:
        shutil.copy(keys, folder / KEYS)


def _write_files(folder: Path, files: Files) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(text)
        if path.suffix == ".sh":
            path.chmod(0o755)


def _certify(issuer: _Issuer, folder: Path, identities: Iterable[Identity], hosts: list[str]) -> None:
    """Put the identities' certificates into a host's folder, and no others."""
    target = folder / CERTIFICATES
    shutil.rmtree(target, ignore_errors=True)
    for identity in identities:
        issued = issuer.issue(identity, hosts)
        place = target / "issued" / identity.role.value / identity.name
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        shutil.copytree(issued, place)
        if not (target / AUTHORITIES).exists():
            shutil.copy(issued / AUTHORITIES, target / AUTHORITIES)


@dataclass(frozen=True, slots=True)
class _Issuer:
    """An authority, and the certificates that it has issued before."""

    authority: Authority
    known: Mapping[Identity, Issued]

    @classmethod
    def of(cls, folder: Path) -> _Issuer:
        """Load the authority from a folder, or create it there. Raise AuthorityProblem, OSError."""
        if (folder / "ca.key").exists():
            authority = Authority.load(folder)
        else:
            authority = Authority.create(folder)
            note(f"new authorities in {folder}: keep ca.key and etcd-ca.key on a machine without services")
        return cls(authority, {issued.identity: issued for issued in authority.issued()})

    def issue(self, identity: Identity, hosts: list[str]) -> Path:
        """Return the folder of a certificate for these hosts; one that there is stays as long as it lasts."""
        old = self.known.get(identity)
        end = datetime.datetime.now(datetime.UTC) + _LEFT
        if old is not None and old.not_after > end and set(hosts) <= set(old.hosts):
            return old.folder
        return self.authority.issue(identity, hosts=hosts).folder


def _next_steps(kind: str, source: FleetFile, out: Path, authority: Path) -> Iterable[str]:
    """Yield what to do now, in this order."""
    fleet: Fleet = source.fleet
    sudo = "sudo " if kind != "processes" else ""
    for host in control_first(fleet):
        address = fleet.hosts[host].address
        target = f"[{address}]" if ":" in address else address
        # What is no longer there goes, but not the state of `tailrace up`.
        copy = f"rsync -a --delete --exclude=/.run {quote(f'{out / host}/')} '{target}:tailrace/'"
        yield f"{copy} && ssh {address} {sudo}sh tailrace/start.sh"
    if kind == "processes":
        return
    operator, root = (
        certificate_folder(str(authority), each.role.value, each.name) for each in (OPERATOR, ETCD_ROOT)
    )
    if fleet.tls:
        cluster = f" --cluster {fleet.cluster}" if fleet.cluster != "default" else ""
        yield f"tailrace etcd-roles --apply --etcd {','.join(endpoints(fleet))} --tls {quote(root)}{cluster}"
    with_tls = f" --tls {quote(operator)}" if fleet.tls else ""
    yield f"tailrace apply -f {quote(str(source.path))}{with_tls}"
    yield f"# Prometheus: {out / PROMETHEUS}/prometheus.yml; control host: {control_hosts(fleet)[0]}"
