"""What changes of a running local cluster when it is to be as another plan says. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tailrace.local.plan import THREADS, PartSpec, Tier
from tailrace.local.state import Part

# Their values are free ports, which a part keeps.
_ADDRESSES = ("--etcd", "--listen", "--metrics")


@dataclass(frozen=True, slots=True)
class Changes:
    """Parts to start, to restart with another command, and to stop."""

    added: Sequence[PartSpec]
    changed: Sequence[PartSpec]
    removed: Sequence[str]

    def __bool__(self) -> bool:
        """Return whether anything changes."""
        return bool(self.added or self.changed or self.removed)


def compare(running: Sequence[Part], wanted: Sequence[PartSpec], etcd: str) -> Changes:
    """Return what makes the parts as planned. Parts that run keep their addresses.

    `etcd`: where it runs, whatever the plan says.
    """
    specs = {part.name: part.spec for part in running if part.spec is not None}
    # What names a part by its address, such as a monitor for spans, finds it where it runs.
    now = {spec.address: specs[spec.name].address for spec in wanted if spec.name in specs}
    wanted = [replace(spec, environment=_at(spec.environment, now)) for spec in wanted]
    # Behind an edge, a front end's own HTTP port is one of them.
    behind_edge = all(any(spec.tier is Tier.EDGE for spec in each) for each in (specs.values(), wanted))
    added, changed = [], []
    for spec in wanted:
        old = specs.get(spec.name)
        if old is None:
            added.append(replace(spec, command=_with(spec.command, {"--etcd": etcd})))
            continue
        own = behind_edge and spec.tier is Tier.FRONTEND
        addresses = (*_ADDRESSES, "--http") if own else _ADDRESSES
        if spec.tier is not Tier.ETCD and _essence(spec, addresses) != _essence(old, addresses):
            kept = {flag: old.option(flag) for flag in addresses}
            http = old.http if own else spec.http
            changed.append(replace(spec, command=_with(spec.command, kept), address=old.address, http=http))
    names = {spec.name for spec in wanted}
    # A file says nothing about the console.
    gone = [part.name for part in running if part.name not in names and part.tier != Tier.CONSOLE]
    return Changes(added, changed, gone)


def differing(old: Sequence[str], new: Sequence[str]) -> str:
    """Return what a command loses and gains, for a reader."""
    lost = [f"-{word}" for word in old if word not in new]
    return " ".join([*lost, *(f"+{word}" for word in new if word not in old)])


def _essence(spec: PartSpec, addresses: Sequence[str]) -> tuple[object, ...]:
    """Return what must be equal for a part to go on as it is."""
    # The number of threads depends on the number of workers, and is worth no restart.
    environment = {name: value for name, value in spec.environment.items() if name not in THREADS}
    return _with(spec.command, dict.fromkeys(addresses, "")), environment, tuple(spec.members)


def _at(environment: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with other addresses in its URLs."""
    parted = {name: value.partition("://") for name, value in environment.items()}
    return {name: head + mark + now.get(rest, rest) for name, (head, mark, rest) in parted.items()}


def _with(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return the command with other values of these flags; those that it does not have are left out."""
    words = list(command)
    for flag, value in values.items():
        if flag in words:
            words[words.index(flag) + 1] = value
    return words
