"""`tailrace serve scaler`: start and stop workers of this machine as the schedulers' numbers say."""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import click
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from tailrace.brief_help import BriefCommand
from tailrace.local.certificates import OPERATOR, certificate_folder, certify, transport_of
from tailrace.local.change import with_options
from tailrace.local.plan import DEVICES, PartSpec, ScaledModel
from tailrace.local.ports import LOOPBACK, PortUnavailable, free_ports
from tailrace.local.process import PartFailed, PartProcess, ask_to_stop, stop_part
from tailrace.local.progress import Progress
from tailrace.local.restart import DRAIN_S, Restarter
from tailrace.local.state import Part, RunFolder, RunFolderBusy, RunState
from tailrace.scaling import DesiredInstances, Need, Scaling
from tailrace.security.roles import Identity, Role
from tailrace.security.transport import TlsTransport
from tailrace.service.options import log_format_option
from tailrace.service.probe import get_directly
from tailrace.service.runtime import Shutdown, run_service
from tailrace.service.tasks import Backoff, Loop, cancel, run_once, supervised
from tailrace.telemetry.incidents import guarded
from tailrace.telemetry.log_format import VARIABLE, log_as

log = logging.getLogger(__name__)

KIND: Final = "scaler"
_METRIC: Final = "tailrace_desired_instances"
_INTERVAL_S: Final = 1.0
_TIMEOUT_S: Final = 2.0
_PAGE_BYTES: Final = 64 << 20
_POLL_S: Final = 0.2
# After a worker of a model has failed, before the next one of it is started.
_RETRY_FIRST_S: Final = 5.0
_RETRY_MAX_S: Final = 300.0
# Without a failure for so long, the next one is the first one again.
_STABLE_S: Final = 600.0


@click.command(KIND, cls=BriefCommand)
@click.option(
    "--run-dir",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    required=True,
    metavar="DIR",
    help="The .run folder of the cluster.",
)
@log_format_option
def command(run_dir: Path, log_format: str) -> None:
    """Start and stop workers of a local cluster as their load needs them (autoscale in fleet.yaml).

    tailrace up -f starts it.
    """
    log_as(KIND, KIND)
    os.environ[VARIABLE] = log_format
    run_service(lambda shutdown: serve(RunFolder(run_dir.absolute()), shutdown))


async def serve(folder: RunFolder, shutdown: Shutdown) -> None:
    """Run until cancelled."""
    scaler = Scaler(folder)
    try:
        async with supervised({KIND: scaler.run}):
            await asyncio.get_running_loop().create_future()
    finally:
        await scaler.close()


def difference(
    scaled: ScaledModel, parts: Sequence[Part], wanted: int
) -> tuple[list[PartSpec], list[Part], list[Part]]:
    """Return the workers of a model to start, those to stop, last one first, and those that have ended."""
    order = {spec.name: number for number, spec in enumerate(scaled.workers)}
    own = sorted((part for part in parts if part.name in order), key=lambda part: order[part.name])
    ended = [part for part in own if not part.identity.alive()]
    running = [part for part in own if part not in ended and not part.leaving]
    taken = {part.name for part in own if part not in ended}
    free = [spec for spec in scaled.workers if spec.name not in taken]
    return free[: max(0, wanted - len(running))], running[wanted:][::-1], ended


def freest(devices: Sequence[str], parts: Sequence[Part]) -> str:
    """Return the GPUs, as CUDA_VISIBLE_DEVICES has them, that the fewest of these parts use."""
    used = [
        gpu
        for part in parts
        if part.identity.alive()
        for gpu in part.spec.environment.get(DEVICES, "").split(",")
    ]
    return min(devices, key=lambda place: sum(used.count(gpu) for gpu in place.split(",")))


@dataclass(slots=True)
class _Model:
    """What is remembered of a model between two rounds."""

    scaling: Scaling
    desired: DesiredInstances
    backoff: Backoff = field(default_factory=lambda: Backoff(_RETRY_FIRST_S, _RETRY_MAX_S))
    failed_s: float = 0.0
    # When the next worker may be started.
    next_s: float = 0.0

    def failed(self, now_s: float) -> float:
        """Return the seconds for which no worker is started."""
        if now_s - self.failed_s > _STABLE_S:
            self.backoff.reset()
        self.failed_s = now_s
        delay_s = self.backoff.next_s()
        self.next_s = now_s + delay_s
        return delay_s


class Scaler:
    """Bring the number of each scaled model's workers to what its schedulers desire.

    The state file alone says which workers run: other commands may change it at any time. The folder's lock
    is held while processes are started or told to stop, and not while they load or hand over their work.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._models: dict[str, _Model] = {}
        # Children, until they have been reaped.
        self._processes: list[PartProcess] = []
        # What waits for a worker to be ready or to end, by its pid.
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._unanswered = False

    async def run(self) -> None:
        """Follow the numbers; run until cancelled."""
        while True:
            await self.round()
            await asyncio.sleep(_INTERVAL_S)

    async def round(self) -> None:
        """Compare once, and start or stop what differs."""
        self._reap()
        self._processes = [each for each in self._processes if each.part.identity.alive()]
        self._tasks = {pid: task for pid, task in self._tasks.items() if not task.done()}
        state = self._folder.read()
        if state is None or not state.ready:
            return
        desired = await asyncio.to_thread(desired_instances, state)
        self._tell_unanswered(state, desired)
        for scaled in state.scaled:
            if scaled.model in desired:
                with guarded(KIND, scaled.model):
                    self._follow(scaled, state, desired[scaled.model])

    async def close(self) -> None:
        """Stop watching; workers go on."""
        await cancel(*self._tasks.values())

    def _follow(self, scaled: ScaledModel, state: RunState, desired: float) -> None:
        now_s = time.monotonic()
        model = self._model(scaled, now_s)
        present = sum(part.name in scaled.names and part.identity.alive() for part in state.staying)
        wanted = model.desired.update(Need(desired, 0), present, now_s)
        for part in state.parts:
            if part.leaving and part.identity.pid not in self._tasks and part.identity.alive():
                # An earlier scaler told it to stop.
                self._watch(part, partial(self._see_off, part))
        if any(difference(scaled, state.parts, wanted)):
            try:
                with self._folder.locked(patience_s=0.0):
                    self._change(scaled, model, wanted, now_s)
            except RunFolderBusy:
                log.debug("another command changes the cluster")

    def _change(self, scaled: ScaledModel, model: _Model, wanted: int, now_s: float) -> None:
        """Start and stop workers, holding the folder's lock."""
        state = self._folder.read()
        if state is None or scaled not in state.scaled:
            return
        start, stop, ended = difference(scaled, state.parts, wanted)
        if any(part.identity.pid in self._tasks for part in ended):
            return  # whoever watches them says why first
        for part in ended:
            state.parts.remove(part)
            if not part.leaving:
                self._fail(model, f"{part.name} has ended ({part.log})", now_s)
                self._watch(part, partial(self._remove, part))
        for part in stop:
            log.info("%s: %d desired; %s stops", scaled.model, wanted, part.name)
            state.parts[state.parts.index(part)] = leaving = msgspec.structs.replace(part, leaving=True)
            # Recorded first: whoever reads the file counts on it no more.
            self._folder.write(state)
            ask_to_stop(leaving)
            self._watch(leaving, partial(self._see_off, leaving))
        self._folder.write(state)
        for spec in start:
            if now_s < model.next_s:
                return
            log.info("%s: %d desired; %s starts", scaled.model, wanted, spec.name)
            try:
                self._launch(self._at_hand(scaled, spec, state), state)
            except (PartFailed, PortUnavailable) as error:
                self._fail(model, str(error), now_s)

    def _fail(self, model: _Model, problem: str, now_s: float) -> None:
        log.error("%s; the next start is in %.0f s", problem, model.failed(now_s))

    def _at_hand(self, scaled: ScaledModel, spec: PartSpec, state: RunState) -> PartSpec:
        """Return a worker as it can start now: on free ports and the freest GPUs."""
        listen, metrics = (f"{LOOPBACK}:{port}" for port in free_ports(2))
        values = {"--etcd": state.etcd, "--listen": listen, "--metrics": metrics}
        devices = {DEVICES: freest(scaled.devices, state.parts)} if scaled.devices else {}
        return replace(
            spec,
            command=with_options(spec.command, values),
            address=listen,
            environment={**spec.environment, **devices},
        )

    def _launch(self, spec: PartSpec, state: RunState) -> None:
        role = Role.WORKER
        if (
            state.certificates
            and not Path(certificate_folder(state.certificates, role.value, spec.name)).exists()
        ):
            certify(state.certificates, [Identity(role, spec.name)])
        restarter = Restarter(self._folder, state, Progress("tailrace scaler"))
        process = restarter.launch(spec)
        self._processes.append(process)
        self._watch(process.part, partial(self._see_in, restarter, process))

    def _watch(self, part: Part, until: Loop) -> None:
        if (before := self._tasks.get(part.identity.pid)) is not None:
            # It stops while it starts.
            before.cancel()
        self._tasks[part.identity.pid] = run_once("workers that start or stop", until, part.name)

    async def _see_in(self, restarter: Restarter, process: PartProcess) -> None:
        """Wait until a worker is in use; stop one that fails. The next round takes it off the list."""
        try:
            await restarter.use(process, {})
        except PartFailed as error:
            log.error("%s", error)
            await self._remove(process.part)

    async def _see_off(self, part: Part) -> None:
        """Wait until a worker has ended that was told to; stop one that takes too long."""
        try:
            async with asyncio.timeout(DRAIN_S):
                while part.identity.alive():  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            log.warning("%s has not drained within %.0f s", part.name, DRAIN_S)
        await self._remove(part)
        for model in self._models.values():
            # What failed for lack of GPUs may start now.
            model.next_s = 0.0

    async def _remove(self, part: Part) -> None:
        """End a worker, and what it has left behind."""
        await asyncio.to_thread(stop_part, part, 0.0, self._reap)

    def _model(self, scaled: ScaledModel, now_s: float) -> _Model:
        scaling = Scaling(least=scaled.least, most=scaled.most, up_delay_s=0.0, cooldown_s=scaled.hold_s)
        known = self._models.get(scaled.model)
        if known is None or known.scaling != scaling:
            known = self._models[scaled.model] = _Model(scaling, DesiredInstances(scaling, now_s))
        return known

    def _reap(self) -> None:
        for process in self._processes:
            process.reap()

    def _tell_unanswered(self, state: RunState, desired: Mapping[str, float]) -> None:
        unanswered = bool(state.scaled) and not desired
        if unanswered != self._unanswered:
            self._unanswered = unanswered
            log.warning("%s", "no scheduler says how many are desired" if unanswered else "schedulers answer")


def desired_instances(state: RunState) -> dict[str, float]:
    """Return the desired number of instances by model, of those whose leading scheduler answers."""
    specs = {part.name: part.spec for part in state.parts}
    names = {name for scaled in state.scaled for name in scaled.schedulers if name in specs}
    transport = transport_of(state.certificates, OPERATOR)
    context = transport.folder.current().client_context if isinstance(transport, TlsTransport) else None
    scheme = "http" if context is None else "https"
    told: dict[str, dict[str, float]] = {}
    for name in sorted(names):
        url = f"{scheme}://{specs[name].option('--metrics')}/metrics"
        try:
            with get_directly(url, _TIMEOUT_S, context) as reply:
                page = reply.read(_PAGE_BYTES)
            told[name] = _read(page.decode())
        except (OSError, ValueError, http.client.HTTPException) as error:
            log.debug("%s: %s", url, error)
    return {
        scaled.model: told[name][scaled.model]
        for scaled in state.scaled
        for name in scaled.schedulers
        if scaled.model in told.get(name, {})
    }


def _read(page: str) -> dict[str, float]:
    """Return the desired numbers in a page of metrics. Raise ValueError."""
    lines = "".join(f"{line}\n" for line in page.splitlines() if line.startswith(_METRIC))
    return {
        sample.labels["model"]: sample.value
        for family in text_string_to_metric_families(lines)
        for sample in family.samples
        if "model" in sample.labels
    }
