"""One folder for each host of a fleet, which is copied as it is, and one command that starts it. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from msgspec import structs

from tailrace import __version__
from tailrace.durations import in_seconds
from tailrace.fleet.file import Fleet, to_yaml
from tailrace.fleet.hosts import (
    ANYWHERE,
    METRICS_ABOVE,
    Installation,
    control_hosts,
    edges,
    host_plan,
    members,
    ports,
)
from tailrace.local.certificates import ETCD_ROOT, OPERATOR, certificate_folder
from tailrace.local.options import ClusterOptions
from tailrace.local.plan import PartSpec, Plan, Tier
from tailrace.security.credentials import AUTHORITIES, CERTIFICATE, KEY
from tailrace.security.roles import Identity, Role, server_name

Files = Mapping[str, str]
"""Texts by path in a host's folder; those that end in .sh are commands."""

CERTIFICATES: Final = "tls"
"""Folder in a host's folder with its certificates."""
KEYS: Final = "keys.json"
"""Users' keys in a host's folder."""
PROMETHEUS: Final = "prometheus"
"""Folder beside those of the hosts."""
SCRAPER: Final = Identity(Role.TELEMETRY, "prometheus")

_ETC: Final = "/etc/tailrace"
_DATA: Final = "/var/lib/tailrace"
_PROGRAMS: Final = "/opt/tailrace/bin"
_STOP_S: Final = {"frontend": 330, "edge": 330, "migration": 75, "worker": 90}
_OTHERS_STOP_S: Final = 30
# By which start.sh knows the units that it may remove.
_MADE: Final = "Made by tailrace render"
# Two seconds and the probe's own time each: an engine loads its model.
_READY_TRIES: Final = 450
# As in deploy/Dockerfile.
CONTAINER_USER: Final = "10001"
_UNIT: Final = Path(__file__).with_name("unit.service")
ETCD_IMAGE: Final = "quay.io/coreos/etcd:v3.5.33"
_DEVICE_NODES: Final = (
    "ExecStartPre=-+/bin/sh -c 'command -v nvidia-modprobe >/dev/null && nvidia-modprobe -c 0 -u'\n"
)
_TARGET: Final = """\
[Unit]
Description=Every part of Tailrace on this host

[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True, slots=True)
class HostFolder:
    """The folder of a host: texts, and whose certificates are beside them."""

    files: Files
    identities: Sequence[Identity]
    # Whether users' keys belong into it.
    needs_keys: bool = False


def systemd(fleet: Fleet, options: ClusterOptions, host: str) -> HostFolder:
    """Return a host's units, and the script that installs and starts them."""
    plan = host_plan(fleet, options, host, _installed(fleet, f"{_PROGRAMS}/tailrace", "/usr/bin/etcd"))
    units = {f"units/tailrace-{part.name}.service": _unit(part, plan) for part in plan.parts}
    files = {
        **units,
        "units/tailrace.target": _TARGET,
        "firewall.nft": _firewall(fleet, plan, host),
        "start.sh": _START_UNITS,
    }
    return HostFolder(files, _identities(fleet, plan), _needs_keys(plan))


def processes(fleet: Fleet, options: ClusterOptions, host: str) -> HostFolder:
    """Return what `tailrace up` needs on a host, where nothing else supervises processes."""
    plan = host_plan(fleet, options, host, ANYWHERE)
    files = {
        # Its keys are beside it there, wherever they are here.
        "fleet.yaml": to_yaml(structs.replace(fleet, keys=KEYS if fleet.keys else "")),
        "firewall.nft": _firewall(fleet, plan, host),
        "start.sh": _START_PROCESSES.format(host=host),
    }
    # `tailrace up` sets policy and SLO, and looks whether each part is ready.
    operator = [OPERATOR] if fleet.tls else []
    root = [ETCD_ROOT] if fleet.tls and host in [*members(fleet)][:1] else []
    return HostFolder(files, [*_identities(fleet, plan), *operator, *root], _needs_keys(plan))


def compose(fleet: Fleet, options: ClusterOptions, host: str) -> HostFolder:
    """Return a host's containers, on the host's network, and the script that starts them."""
    plan = host_plan(fleet, options, host, _installed(fleet, "tailrace", "etcd"))
    services = {part.name: _container(part, plan) for part in plan.parts}
    content = {"name": f"tailrace-{fleet.cluster}", "services": services, "volumes": {"data": {}}}
    text = yaml.safe_dump(content, sort_keys=False, width=110)
    files = {
        "compose.yaml": text,
        "firewall.nft": _firewall(fleet, plan, host),
        "start.sh": _START_CONTAINERS,
    }
    return HostFolder(files, _identities(fleet, plan), _needs_keys(plan))


def _installed(fleet: Fleet, tailrace: str, etcd: str) -> Installation:
    """Return where things are on a host on which start.sh has installed them."""
    keys = f"{_ETC}/{KEYS}" if fleet.keys else ""
    return Installation([tailrace], etcd, _DATA, f"{_ETC}/{CERTIFICATES}", keys)


def prometheus(fleet: Fleet, options: ClusterOptions, alerts: str) -> Files:
    """Return Prometheus's configuration for all hosts. `alerts`: the rules."""
    targets: dict[str, list[dict[str, Any]]] = {}
    for host in fleet.hosts:
        plan = host_plan(fleet, options, host, ANYWHERE)
        for part in plan.parts:
            if part.tier is not Tier.ETCD:
                address, _, port = part.address.rpartition(":")
                target = f"{address}:{int(port) + METRICS_ABOVE}"
                labels = {"member": part.name}
                if plan.own:
                    # By which alerts tell apart which one lacks a leader.
                    labels["cluster"] = part.option("--cluster")
                targets.setdefault(part.kind, []).append({"targets": [target], "labels": labels})
    jobs = [_job(kind, each, fleet.tls) for kind, each in targets.items()]
    config = {
        "global": {"scrape_interval": "5s", "scrape_timeout": "4s"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": jobs,
    }
    return {"prometheus.yml": yaml.safe_dump(config, sort_keys=False, width=110), "alerts.yml": alerts}


def _job(kind: str, targets: Sequence[Mapping[str, Any]], tls: bool) -> dict[str, Any]:
    job: dict[str, Any] = {"job_name": f"tailrace-{kind}", "static_configs": [*targets]}
    if kind == "monitor":
        # It speaks of instances by their ids: its label `instance` is kept, not taken for the target's.
        job["honor_labels"] = True
    if tls:
        folder = f"{CERTIFICATES}/issued/{SCRAPER.role.value}/{SCRAPER.name}"
        job["scheme"] = "https"
        job["tls_config"] = {
            "ca_file": f"{folder}/{AUTHORITIES}",
            "cert_file": f"{folder}/{CERTIFICATE}",
            "key_file": f"{folder}/{KEY}",
            "server_name": server_name(Role(kind)),
        }
    return job


def _needs_keys(plan: Plan) -> bool:
    return bool(plan.tier(Tier.FRONTEND) or plan.tier(Tier.EDGE))


def _identities(fleet: Fleet, plan: Plan) -> list[Identity]:
    return [Identity(Role(part.role), part.name) for part in plan.parts] if fleet.tls else []


def stop_s(part: PartSpec) -> int:
    """Return the seconds that a part may take to hand over or finish its work (--drain-timeout, --patience),
    and to close."""
    if drain := part.option("--drain-timeout"):
        return math.ceil(float(in_seconds(drain))) + _OTHERS_STOP_S
    return _STOP_S.get(part.kind, _OTHERS_STOP_S)


def _unit(part: PartSpec, plan: Plan) -> str:
    kind = part.kind
    devices = kind == "worker"
    lines = []
    if devices:
        # Neither PrivateDevices nor ProtectClock, which implies a list of allowed devices.
        lines = ["# GPUs and InfiniBand are devices; RDMA and CUDA pin memory.", "LimitMEMLOCK=infinity"]
    else:
        lines = ["PrivateDevices=yes", "ProtectClock=yes"]
    if kind == "monitor":
        lines += ["# Requests wait for the scheduler, and nothing waits for a report.", "Nice=5"]
    environment = {"HF_HOME": f"{_DATA}/huggingface", **plan.environment, **part.environment}
    after = {"worker": " nvidia-persistenced.service", "scheduler": " tailrace-monitor.service"}.get(kind, "")
    ready = "" if part.tier is Tier.ETCD else f"# Ready: {_probe(part, plan)}\n"
    return _UNIT.read_text().format(
        made=f"# {_MADE}\n{ready}",
        name=part.name,
        after=after,
        environment="\n".join(f"Environment={_quoted(f'{k}={v}')}" for k, v in environment.items()),
        # CUDA makes missing device nodes with a setuid helper, which NoNewPrivileges forbids: "+" runs it as
        # root before the service starts; "-": a machine without GPUs has none.
        prepare=_DEVICE_NODES if devices else "",
        command=" ".join(_quoted(word.replace("$", "$$")) for word in part.command),
        stop_s=stop_s(part),
        role="\n".join([*lines, ""]),
    )


def _probe(part: PartSpec, plan: Plan) -> str:
    """Return the arguments of tailrace.service.probe for a part."""
    tls = f" --tls {certificate_folder(plan.certificates, part.role, part.name)}" if part.role else ""
    return f"{part.address}{tls}"


def _quoted(word: str) -> str:
    """Return a word of a unit's command line or environment as systemd reads it back."""
    word = word.replace("%", "%%")
    if word and not any(each.isspace() or each in "\"'\\;" for each in word):
        return word
    return json.dumps(word, ensure_ascii=False)


def _container(part: PartSpec, plan: Plan) -> dict[str, Any]:
    kind = part.kind
    engine = kind in ("worker", "frontend")
    environment = {**plan.environment, **part.environment}
    container: dict[str, Any] = {
        "image": f"tailrace-{'engine' if engine else 'control'}:{__version__}",
        # A $ is Compose's own.
        "command": [word.replace("$", "$$") for word in part.command],
        "network_mode": "host",
        "environment": {key: value.replace("$", "$$") for key, value in environment.items()},
        # The folder, so that a file that takes the place of another is seen.
        "volumes": [f"data:{_DATA}", f"{_ETC}:{_ETC}:ro"],
        "restart": "unless-stopped",
        "init": True,
        "stop_grace_period": f"{stop_s(part)}s",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "read_only": True,
        "tmpfs": ["/tmp:exec,mode=1777"],
        "mem_limit": "64g" if engine else "4g",
        "pids_limit": 8192 if engine else 512,
    }
    if part.tier is not Tier.ETCD:
        # Its image has Python.
        probe = ["CMD", "python", "-m", "tailrace.service.probe", *_probe(part, plan).split(" ")]
        # An engine loads its model: one that is not ready yet has not failed.
        container["healthcheck"] = {
            "test": probe,
            "interval": "5s",
            "timeout": "6s",
            "start_period": f"{2 * _READY_TRIES}s",
        }
    if kind == "etcd":
        container |= {"image": ETCD_IMAGE, "user": CONTAINER_USER}
    if kind == "worker":
        container["shm_size"] = "1g"
        container["ulimits"] = {"memlock": -1}
        if gpus := part.environment.get("CUDA_VISIBLE_DEVICES"):
            device = {"driver": "nvidia", "device_ids": gpus.split(","), "capabilities": ["gpu"]}
            container["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
            # The container sees its own, from 0 on.
            container["environment"].pop("CUDA_VISIBLE_DEVICES")
    return container


def _firewall(fleet: Fleet, plan: Plan, host: str) -> str:
    """Return nftables' rules for the ports of Tailrace alone; all others stay as they are."""
    here = ports(fleet, plan, host)
    others = {name: each.address for name, each in fleet.hosts.items() if name != host}
    with_edges = [others[name] for name in edges(fleet) if name in others]
    allowed = [*_accept([*others.values()], here.own), *_accept(with_edges, here.behind)]
    own = ", ".join([*here.own, *here.behind])
    lines = [
        "# nft -f firewall.nft: only the fleet's hosts reach its ports. Add the operators' addresses, and",
        "# Prometheus's. Other ports stay as they are. Loaded again, it takes the place of what was loaded.",
        "table inet tailrace",
        "delete table inet tailrace",
        "table inet tailrace {",
        "  chain input {",
        "    type filter hook input priority filter; policy accept;",
        '    iif "lo" accept',
    ]
    if here.users:
        lines.append(f"    tcp dport {{ {', '.join(here.users)} }} accept")
    return "\n".join([*lines, *allowed, f"    tcp dport {{ {own} }} drop", "  }", "}", ""])


def _accept(addresses: Sequence[str], to: Sequence[str]) -> list[str]:
    """Return the rules that let these addresses reach these ports."""
    by_family = {
        "ip6": [address for address in addresses if ":" in address],
        "ip": [address for address in addresses if ":" not in address],
    }
    return [
        f"    {family} saddr {{ {', '.join(each)} }} tcp dport {{ {', '.join(to)} }} accept"
        for family, each in by_family.items()
        if each and to
    ]


_START_UNITS: Final = f"""\
#!/bin/sh
# Install this host's part of the fleet and start it: sudo sh start.sh. Run it again after a change: what has
# changed is restarted, one after another, and hands over its requests.
set -eu
cd "$(dirname "$0")"
[ "$(id -u)" = 0 ] || {{ echo "run it as root: sudo sh start.sh" >&2; exit 1; }}
[ -x {_PROGRAMS}/tailrace ] || {{ echo "{_PROGRAMS}/tailrace: install it first" >&2; exit 1; }}
id tailrace >/dev/null 2>&1 ||
  useradd --system --home-dir {_DATA} --shell /usr/sbin/nologin tailrace
install -d -m 750 -g tailrace {_ETC}
if [ -d {CERTIFICATES} ]; then
  # Services pick up renewed certificates by themselves.
  cp -R {CERTIFICATES} {_ETC}/
  chown -R tailrace:tailrace {_ETC}/{CERTIFICATES}
  chmod -R u=rwX,go= {_ETC}/{CERTIFICATES}
fi
[ ! -f keys.json ] || install -m 640 -g tailrace keys.json {_ETC}/keys.json
for old in /etc/systemd/system/tailrace-*.service; do
  name=$(basename "$old")
  # Those that were set up by hand stay.
  if [ -f "$old" ] && [ ! -f "units/$name" ] && grep -q '^# {_MADE}' "$old"; then
    systemctl disable --now "$name"
    rm "$old"
  fi
done
# A part that ran takes requests again before the next one hands over its own. What is not restarted is not
# yet installed, so that this goes on where it was interrupted.
for unit in units/*; do
  name=$(basename "$unit")
  ! cmp -s "$unit" "/etc/systemd/system/$name" || continue
  install -m 644 "$unit" "/etc/systemd/system/$name"
  systemctl daemon-reload
  # A restart of the target is one of every part.
  [ "$name" != tailrace.target ] || continue
  ran=$(systemctl is-active "$name" || true)
  systemctl restart "$name"
  probe=$(sed -n 's/^# Ready: //p' "$unit")
  if [ "$ran" = active ] && [ -n "$probe" ]; then
    echo "$name: restarted; waiting until it is ready"
    left={_READY_TRIES}
    until {_PROGRAMS}/python -m tailrace.service.probe $probe >/dev/null 2>&1; do
      left=$((left - 1))
      [ $left -gt 0 ] || {{ echo "$name is not ready: journalctl -u $name" >&2; exit 1; }}
      sleep 2
    done
  fi
done
systemctl enable --quiet $(cd units && echo *)
systemctl start tailrace.target
systemctl list-units 'tailrace-*' --no-pager
"""

_START_CONTAINERS: Final = f"""\
#!/bin/sh
# Start this host's containers: sudo sh start.sh. Run it again after a change: what has changed is replaced,
# one after another, and hands over its requests.
set -eu
cd "$(dirname "$0")"
[ "$(id -u)" = 0 ] || {{ echo "run it as root: sudo sh start.sh" >&2; exit 1; }}
install -d -m 750 -o {CONTAINER_USER} -g {CONTAINER_USER} {_ETC}
for each in {CERTIFICATES} {KEYS}; do
  # The user of the containers reads them.
  [ ! -e "$each" ] || cp -R "$each" {_ETC}/
done
chown -R {CONTAINER_USER}:{CONTAINER_USER} {_ETC}
# A part that ran takes requests again before the next one hands over its own.
for name in $(docker compose config --services); do
  ran=$(docker compose ps --quiet --status running "$name")
  docker compose up --detach --no-deps "$name"
  if [ -n "$ran" ] && [ "$ran" != "$(docker compose ps --quiet "$name")" ]; then
    echo "$name: replaced; waiting until it is ready"
    docker compose up --detach --no-deps --wait --wait-timeout {2 * _READY_TRIES} "$name" ||
      {{ echo "$name is not ready: docker compose logs $name" >&2; exit 1; }}
  fi
done
docker compose up --detach --remove-orphans
"""

_START_PROCESSES: Final = """\
#!/bin/sh
# Start this host's part of the fleet; tailrace down, in this folder, stops it.
set -eu
cd "$(dirname "$0")"
command -v tailrace >/dev/null || {{
  echo "no tailrace on PATH: install it here, and put its bin folder there" >&2
  exit 1
}}
exec tailrace up --file fleet.yaml --on {host}
"""


def control_first(fleet: Fleet) -> list[str]:
    """Return the hosts in the order in which they are started: etcd and control services first."""
    first = [*members(fleet), *control_hosts(fleet)]
    return [*dict.fromkeys([*first, *fleet.hosts])]
