"""What changes of a running local cluster when it is to be as another plan says. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tailrace.local.plan import DEVICES, THREADS, PartSpec, Plan, ScaledModel, Tier
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
    specs = {part.name: part.spec for part in running}
    # What names a part by its address, such as a monitor for spans, finds it where it runs.
    now = {spec.address: specs[spec.name].address for spec in wanted if spec.name in specs}
    wanted = [replace(spec, environment=_at(spec.environment, now)) for spec in wanted]
    # Behind an edge, a front end's own HTTP port is one of them.
    behind_edge = all(any(spec.tier is Tier.EDGE for spec in each) for each in (specs.values(), wanted))
    added, changed = [], []
    for spec in wanted:
        old = specs.get(spec.name)
        if old is None:
            added.append(replace(spec, command=with_options(spec.command, {"--etcd": etcd})))
            continue
        own = behind_edge and spec.tier is Tier.FRONTEND
        addresses = (*_ADDRESSES, "--http") if own else _ADDRESSES
        if spec.tier is not Tier.ETCD and _essence(spec, addresses) != _essence(old, addresses):
            kept = {flag: old.option(flag) for flag in addresses}
            environment = {**spec.environment, **_devices(spec, old)}
            changed.append(
                replace(
                    spec,
                    command=with_options(spec.command, kept),
                    address=old.address,
                    http=old.http if own else spec.http,
                    environment=environment,
                )
            )
    names = {spec.name for spec in wanted}
    # A file says nothing about the console.
    gone = [part.name for part in running if part.name not in names and part.tier is not Tier.CONSOLE]
    return Changes(added, changed, gone)


def within(plan: Plan, running: Sequence[Part], known: Collection[str]) -> list[PartSpec]:
    """Return the parts of the plan, of scaled models as many workers as run now, within their bounds.

    `known`: the models that have been scaled until now. Others start as planned if none of theirs runs.
    """
    names = {part.name for part in running}
    staying = {part.name for part in running if not part.leaving}
    parts = [spec for spec in plan.parts if not spec.scaled]
    for scaled in plan.scaled:
        specs = [spec for spec in scaled.workers if spec.name in staying][: scaled.most]
        if specs or scaled.model in known:
            free = [spec for spec in scaled.workers if spec.name not in names]
            parts += [*specs, *free[: max(0, scaled.least - len(specs))]]
        else:
            parts += [spec for spec in plan.parts if spec.name in scaled.names]
    return parts


def scaling_changes(old: Sequence[ScaledModel], new: Sequence[ScaledModel]) -> Iterator[tuple[str, str]]:
    """Yield what differs of how models are scaled, with the model that it is about."""
    before, after = ({each.model: each for each in scaled} for scaled in (old, new))
    for model in dict.fromkeys((*before, *after)):
        had, has = before.get(model), after.get(model)
        if _bounds(had) != _bounds(has):
            yield model, f"autoscale {_bounds(had)} -> {_bounds(has)}"
        elif (
            had is not None
            and has is not None
            and [_essence(each, _ADDRESSES) for each in had.workers]
            != [_essence(each, _ADDRESSES) for each in has.workers]
        ):
            yield model, "autoscale: workers that start later are other ones"


def _bounds(scaled: ScaledModel | None) -> str:
    if scaled is None:
        return "-"
    held = f", {scaled.hold_s:g} s later" if scaled.hold_s else ""
    return f"{scaled.least} to {scaled.most}{held}"


def differing(old: Sequence[str], new: Sequence[str]) -> str:
    """Return what a command loses and gains, for a reader."""
    lost = [f"-{word}" for word in old if word not in new]
    return " ".join([*lost, *(f"+{word}" for word in new if word not in old)])


def _essence(spec: PartSpec, addresses: Sequence[str]) -> tuple[object, ...]:
    """Return what must be equal for a part to go on as it is."""
    # The number of threads depends on the number of workers, and is worth no restart.
    # A scaled worker has the GPUs that were free when it started.
    passing = (*THREADS, DEVICES) if spec.scaled else THREADS
    environment = {name: value for name, value in spec.environment.items() if name not in passing}
    return with_options(spec.command, dict.fromkeys(addresses, "")), environment, tuple(spec.members)


def _at(environment: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with other addresses in its URLs."""
    parted = {name: value.partition("://") for name, value in environment.items()}
    return {name: head + mark + now.get(rest, rest) for name, (head, mark, rest) in parted.items()}


def _devices(spec: PartSpec, old: PartSpec) -> dict[str, str]:
    """Return the GPUs that a scaled worker keeps, unless it needs another number of them."""
    new, had = (each.environment.get(DEVICES, "") for each in (spec, old))
    keeps = spec.scaled and had and new.count(",") == had.count(",")
    return {DEVICES: had} if keeps else {}


def with_options(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return the command with other values of these flags; those that it does not have are left out."""
    words = list(command)
    for flag, value in values.items():
        if flag in words:
            words[words.index(flag) + 1] = value
    return words
