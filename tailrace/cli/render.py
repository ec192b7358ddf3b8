"""`tailrace render`: make one folder for each host of a fleet, which is copied there as it is."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Final

import click

from tailrace.cli.certs import folder_option
from tailrace.cli.errors import CliError, UsageProblem, file_errors
from tailrace.cli.fleet_file import (
    FleetFile,
    common_options,
    file_option,
    options_of,
    read_fleet_file,
)
from tailrace.cli.output import note
from tailrace.fleet import kubernetes
from tailrace.fleet.chart import chart
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
from tailrace.local.options import DEFAULT_CLUSTER
from tailrace.local.plan import own_clusters
from tailrace.security.authority import Authority, AuthorityProblem, Issued
from tailrace.security.credentials import AUTHORITIES, CERTIFICATE, KEY
from tailrace.security.roles import Identity
from tailrace.tenancy.file import KeyFileUnusable, read_keys

_ALERTS: Final = Path(__file__).parent.parent / "fleet" / "alerts.yml"
# A certificate that ends sooner is issued again.
_LEFT: Final = datetime.timedelta(days=30)


@click.command(epilog="Example: tailrace render systemd -f fleet.yaml --out hosts")
@click.argument("kind", type=click.Choice(["systemd", "compose", "processes", "kubernetes", "helm"]))
@file_option(required=True)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where the folders are written.  [default: hosts; kubernetes; chart]",
)
@folder_option
def render(kind: str, file: Path, out: Path | None, folder: Path) -> None:
    """Make a folder for each host: units, containers or processes, certificates, firewall, and start.sh.

    Copy each to its host and run its start.sh there. After a change of the file, do the same again: start.sh
    restarts what has changed. Prometheus's configuration and alerts are beside them. For Kubernetes, it makes
    one folder of objects, or a Helm chart of the same (docs/kubernetes.md).
    """
    source = read_fleet_file(file)
    fleet = source.fleet
    out = out or Path({"kubernetes": "kubernetes", "helm": "chart"}.get(kind, "hosts"))
    keys = source.beside(fleet.keys) if fleet.keys else None
    if keys is not None:
        if not keys.is_file():
            raise UsageProblem(f"{keys}: no such file; tailrace keys make NAME --file {keys} makes it")
        with file_errors(KeyFileUnusable):
            read_keys(keys)
    if kind in ("kubernetes", "helm"):
        _render_kubernetes(source, out, folder, keys, kind == "helm")
        return
    if not fleet.hosts:
        raise UsageProblem(f"{file}: hosts: there are none; tailrace up -f starts it on one machine")
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
                issuer.issue_operators()
    except FleetError as error:
        raise CliError(f"{file}: {error}") from error
    click.echo("\n".join(_next_steps(kind, source, out, folder)))


def _render_kubernetes(source: FleetFile, out: Path, folder: Path, keys: Path | None, helm: bool) -> None:
    fleet, options = source.fleet, common_options(source)
    try:
        with file_errors(AuthorityProblem):
            kubernetes.require_possible(fleet, options)
            certificates = {}
            if fleet.tls and fleet.kubernetes.certificates == "tailrace":
                issuer = _Issuer.of(folder)
                for identity, hosts in kubernetes.identities(fleet, options).items():
                    issued = issuer.issue(identity, hosts)
                    paths = [path for path in issued.rglob("*") if path.is_file()]
                    certificates[identity] = {
                        str(path.relative_to(issued)): path.read_bytes() for path in paths
                    }
                issuer.issue_operators()
            objects = kubernetes.objects(
                fleet,
                options,
                certificates,
                keys.read_text() if keys is not None else "",
                _ALERTS.read_text(),
            )
            texts = chart(objects) if helm else kubernetes.files(objects)
            out.mkdir(parents=True, exist_ok=True)
            # Certificates' keys are in it.
            out.chmod(0o700)
            for name in kubernetes.NOT_ALWAYS:
                (out / "templates" / name if helm else out / name).unlink(missing_ok=True)
            (out / kubernetes.SECRETS).unlink(missing_ok=True)
            _write_files(out, texts)
    except FleetError as error:
        raise CliError(f"{source.path}: {error}") from error
    click.echo("\n".join(_kubernetes_steps(source, out, folder, [*texts], helm)))


def _kubernetes_steps(
    source: FleetFile, out: Path, authority: Path, files: list[str], helm: bool
) -> Iterator[str]:
    """Yield what to do now, in this order."""
    fleet, own = source.fleet, source.fleet.kubernetes
    in_namespace = f"--namespace {own.namespace}"
    forward = f"kubectl {in_namespace} port-forward"
    if helm:
        if kubernetes.SECRETS in files:
            yield f"kubectl create namespace {own.namespace}"
            yield f"kubectl apply --filename {quote(str(out / kubernetes.SECRETS))}"
        yield f"helm upgrade --install tailrace {quote(str(out))} {in_namespace} --create-namespace"
    else:
        yield f"kubectl apply --kustomize {quote(str(out))}"
    operator, root = (_tls(authority, fleet, identity) for identity in (OPERATOR, ETCD_ROOT))
    if own.certificates == "cert-manager":
        yield f"kubectl {in_namespace} wait certificate --all --for condition=Ready --timeout 120s"
        for each in kubernetes.OPERATORS:
            yield _fetched(each.name, in_namespace)
        operator, root = (f" --tls {each.name}" for each in kubernetes.OPERATORS)
    if fleet.tls:
        members = isinstance(own.etcd, int)
        address = "127.0.0.1:2379" if members else ",".join(kubernetes.endpoints(fleet))
        if members:
            yield f"{forward} service/etcd 2379 &"
        for cluster in _clusters(source):
            yield f"tailrace etcd-roles --apply --etcd {address}{root}{cluster}"
    yield f"{forward} service/scheduler 7101 &"
    yield f"tailrace apply -f {quote(str(source.path))} --admin 127.0.0.1:7101{operator}"
    own_models = [model for model in common_options(source).models if model.own is not None]
    for port, model in enumerate(own_models, start=7102):
        yield f"{forward} service/{model.prefix}scheduler {port}:7101 &"
        to = f"--admin 127.0.0.1:{port} --model {quote(model.served_name)}"
        yield f"tailrace apply -f {quote(str(source.path))} {to}{operator}"
    for name, needed in kubernetes.OPTIONAL.items():
        if name in files:
            yield f"kubectl apply --filename {quote(str(out / name))}    # {needed}"


def _fetched(name: str, in_namespace: str) -> str:
    """Return the command that fetches an operator's certificate into a folder of its name."""
    template = 'go-template="{{index .data \\"$each\\" | base64decode}}"'
    get = f"kubectl {in_namespace} get secret tls-{name} --output {template}"
    files = f"{AUTHORITIES} {CERTIFICATE} {KEY}"
    return f"mkdir -m 700 {name}; (umask 077; for each in {files}; do {get} >{name}/$each; done)"


def _tls(authority: Path, fleet: Fleet, identity: Identity) -> str:
    """Return the option with an operator's certificate."""
    if not fleet.tls:
        return ""
    return f" --tls {quote(certificate_folder(str(authority), identity.role.value, identity.name))}"


def _clusters(source: FleetFile) -> list[str]:
    """Return the option that names each cluster: the fleet's, and those of single models."""
    names = [source.fleet.cluster, *own_clusters(options_of(source))]
    return [f" --cluster {name}" if name != DEFAULT_CLUSTER else "" for name in names]


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
            note(
                f"new authorities in {folder}: whoever has ca.key and etcd-ca.key can issue certificates for "
                "any service; they stay here, so keep this folder, and on no host of the fleet"
            )
        return cls(authority, {issued.identity: issued for issued in authority.issued()})

    def issue_operators(self) -> None:
        """Issue the certificates of the operator and of etcd's root user, which stay here."""
        for operator in (OPERATOR, ETCD_ROOT):
            self.issue(operator, [])

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
    operator, root = (_tls(authority, fleet, identity) for identity in (OPERATOR, ETCD_ROOT))
    if fleet.tls:
        for cluster in _clusters(source):
            yield f"tailrace etcd-roles --apply --etcd {','.join(endpoints(fleet))}{root}{cluster}"
    yield f"tailrace apply -f {quote(str(source.path))}{operator}"
    yield f"# Prometheus: {out / PROMETHEUS}/prometheus.yml; control host: {control_hosts(fleet)[0]}"
