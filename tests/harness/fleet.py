"""A complete Tailrace fleet of real processes, which a test can freeze and kill."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tailrace.service.etcd import etcd_command
from tailrace.tiny import MODEL_PATH, REASONING_PARSER
from tailrace.v1 import admin_pb2, admin_pb2_grpc, migration_pb2, types_pb2
from tests.harness.forked import PYTHONPATH
from tests.harness.processes import Process, tailrace, wait_until
from tests.harness.tries import TRIES, RequestEnded, is_refused_for_now
from tests.ports import free_port
from tests.waiting import WAIT_S

MODEL = "tiny"
# An engine on CPUs computes, and the ranks of one wait for each other, on the cores that everything else runs
# on: two ranks on two cores would keep etcd and the schedulers waiting for longer than a stream lasts.
_ENGINE_NICENESS = 10
# Why a request stays where it is when a process gets no CPU time for seconds.
_LATE = ("failed to connect", "the source did not answer within", "not finished within")
# Why a migration is refused for a moment.
_NOT_YET = ("is suspect", "is in prefill")
_PAUSE_S = 0.1


class Fleet:
    """etcd, control services, workers and front ends under one folder; `close` ends them all."""

    def __init__(self, root: Path, engine: str) -> None:
        self.root = root
        self.engine = engine
        # Processes are forked from one that has imported what they need. All forks share one resource
        # tracker: a test that checks what a worker leaves in shared memory turns this off.
        self.forks_workers = True
        # Of the workers with real engines.
        self.niceness = _ENGINE_NICENESS if engine == "vllm" else 0
        self.processes: dict[str, Process] = {}
        self.addresses: dict[str, str] = {}
        self.metrics_ports: dict[str, int] = {}
        # HTTP URLs of all front ends, and of the one that was started last.
        self.urls: dict[str, str] = {}
        self.http = ""
        # Read by every worker at each fault point, so that a test can arm a fault in a running fleet.
        self.faults = root / "faults.json"
        self._etcd_port = free_port()
        # Folder with plugins of vLLM for the workers; empty: none.
        self.plugins = ""
        # Number of logged holds at each fault point when it was last waited for.
        self._held: dict[str, int] = {}
        self._launches: dict[str, Callable[[], Process]] = {}

    @property
    def etcd(self) -> str:
        """HOST:PORT of etcd."""
        return f"127.0.0.1:{self._etcd_port}"

    # ---- starting

    def start_etcd(self) -> Process:
        """Start etcd, or restart it on the same data."""
        command = etcd_command(self.root / "etcd", self._etcd_port)
        process = self._start("etcd", lambda: Process.launch("etcd", command, self.root / "etcd.log", {}))
        wait_until(lambda: _etcd_answers(self._etcd_port), "etcd")
        return process

    def _launch_service(self, kind: str, name: str = "", arguments: Sequence[str] = ()) -> str:
        name = name or kind
        port = free_port()
        self.addresses[name] = f"127.0.0.1:{port}"
        self._tailrace(name, kind, port, arguments, {})
        return name

    def start_worker(
        self, name: str, arguments: Sequence[str] = (), wait: bool = True, model: str = str(MODEL_PATH)
    ) -> Process:
        """Start a worker with the ID `name`."""
        port = free_port()
        self.addresses[name] = f"127.0.0.1:{port}"
        base = ["--engine", self.engine, "--id", name, "--model", model]
        if self.engine == "vllm":
            base += ["--reasoning-parser", REASONING_PARSER]
        env = {"TAILRACE_FAULTS": f"@{self.faults}", "OMP_NUM_THREADS": "1"}
        process = self._tailrace(name, "worker", port, [*base, *arguments], env)
        if wait:
            self.wait_healthy(name)
        return process

    def start_command(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> Process:
        """Start a process of the fleet that serves no gRPC."""
        log = self.root / f"{name}.log"
        return self._start(name, lambda: Process.launch(name, command, log, env))

    def start_frontend(
        self,
        front: str = "python",
        name: str = "frontend",
        http_port: int = 0,
        options: Sequence[str] = (),
        model: str = str(MODEL_PATH),
        wait: bool = True,
    ) -> Process:
        """Start a front end with vLLM's Python or Rust API server and wait until it serves models.

        `options`: its own options, and after `--` those of `vllm serve`.
        """
        port, http_port = free_port(), http_port or free_port()
        self.addresses[name] = f"127.0.0.1:{port}"
        self.http = self.urls[name] = f"http://127.0.0.1:{http_port}"
        arguments = ["--http", f"127.0.0.1:{http_port}", "--front", front, "--model", model]
        arguments += ["--served-model-name", MODEL, "--reasoning-parser", REASONING_PARSER, "--id", name]
        arguments += options
        process = self._tailrace(name, "frontend", port, arguments, {})
        if wait:
            self.wait_frontend(name)
        return process

    def start_edge(self, name: str = "edge", http_port: int = 0, options: Sequence[str] = ()) -> Process:
        """Start an edge, and wait until it serves; `http` is its address from then on."""
        http_port = http_port or free_port()
        self.http = self.urls[name] = f"http://127.0.0.1:{http_port}"
        self._launch_service("edge", name, ["--id", name, "--http", f"127.0.0.1:{http_port}", *options])
        self.wait_healthy(name)
        return self.processes[name]

    def wait_frontend(self, name: str) -> None:
        """Wait until a front end serves models."""

        def serves() -> bool:
            process = self.processes[name]
            if not process.alive:
                raise RuntimeError(f"front end ended:\n{process.text()[-3000:]}")
            return _get(f"{self.urls[name]}/v1/models") is not None

        wait_until(serves, "the API server")

    def start_control(self, schedulers: int = 1, options: Sequence[str] = ()) -> None:
        """Start etcd, then monitor, migration service and schedulers, with these options, concurrently."""
        self.start_etcd()
        names = [
            self._launch_service("monitor"),
            self._launch_service("migration", arguments=["--journal", str(self.root / "migrations.jsonl")]),
        ]
        for number in range(schedulers):
            name = f"scheduler-{number}"
            names.append(self._launch_service("scheduler", name, ["--id", name, *options]))
        for name in names:
            self.wait_healthy(name)

    def start_model_cluster(self, cluster: str) -> str:
        """Start control services and a worker of another cluster in the same etcd; return the name of its
        scheduler."""
        names = [
            self._launch_service(
                kind, f"{cluster}-{kind}", ["--id", f"{cluster}-{kind}", "--cluster", cluster]
            )
            for kind in ("monitor", "migration", "scheduler")
        ]
        self.start_worker(f"{cluster}-worker", ["--cluster", cluster])
        for name in names:
            self.wait_healthy(name)
        return names[-1]

    def _tailrace(
        self, name: str, kind: str, port: int, arguments: Sequence[str], env: Mapping[str, str]
    ) -> Process:
        self.metrics_ports[name] = free_port()
        command = [
            "serve",
            kind,
            "--etcd",
            self.etcd,
            "--listen",
            f"127.0.0.1:{port}",
            "--metrics",
            f"127.0.0.1:{self.metrics_ports[name]}",
            *arguments,
        ]
        log = self.root / f"{name}.log"
        vllm = kind == "worker" and self.engine == "vllm"
        niceness = self.niceness if kind == "worker" else 0
        path = os.environ.get("PYTHONPATH")
        if kind == "worker" and self.plugins:
            path = os.pathsep.join(filter(None, [self.plugins, path]))
            env = {**env, "PYTHONPATH": path}
        # A process forked from one with another path would not find what is there.
        if path == PYTHONPATH and (self.forks_workers or kind != "worker"):
            return self._start(name, lambda: Process.fork_tailrace(name, command, log, env, niceness, vllm))
        return self._start(name, lambda: Process.launch(name, tailrace(*command), log, env, niceness))

    def _start(self, name: str, launch: Callable[[], Process]) -> Process:
        self._launches[name] = launch
        self.processes[name] = launch()
        return self.processes[name]

    def restart(self, name: str) -> Process:
        """Restart an ended process with the same arguments, without waiting until it serves."""
        return self._start(name, self._launches[name])

    def forget(self, name: str) -> None:
        """Take an ended process out of the fleet, so that it is not restarted."""
        for known in (self.processes, self.addresses, self.metrics_ports, self._launches):
            known.pop(name, None)

    def repair(self, timeout_s: float = WAIT_S) -> None:
        """Restart all ended processes with the same arguments and thaw frozen ones."""
        ended = [name for name, process in self.processes.items() if not process.alive]
        for process in self.processes.values():
            if process.alive:
                process.thaw()
        for name in ended:
            self.restart(name)
        for name in ended:
            if name in self.addresses:
                self.wait_healthy(name, timeout_s)

    # ---- observing

    def wait_healthy(self, name: str, timeout_s: float = WAIT_S) -> None:
        """Wait until the gRPC health check of a service reports SERVING."""

        def healthy() -> bool:
            process = self.processes[name]
            if not process.alive:
                raise RuntimeError(f"{name} ended:\n{process.text()[-3000:]}")
            with grpc.insecure_channel(self.addresses[name]) as channel:
                try:
                    reply = health_pb2_grpc.HealthStub(channel).Check(
                        health_pb2.HealthCheckRequest(), timeout=2
                    )
                except grpc.RpcError:
                    return False
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

        wait_until(healthy, f"{name} to serve", timeout_s)

    def admin(self, scheduler: str = "") -> admin_pb2_grpc.AdminStub:
        """Return the admin API of a scheduler, by default of any that is alive."""
        if not scheduler:
            alive = [n for n in self.addresses if n.startswith("scheduler") and self.processes[n].alive]
            if not alive:
                raise LookupError("no scheduler runs")
            scheduler = alive[0]
        return admin_pb2_grpc.AdminStub(grpc.insecure_channel(self.addresses[scheduler]))

    def leader(self) -> str:
        """Return the name of the leading scheduler, once there is one: on a busy machine it may have to find
        leadership again."""
        found: list[str] = []

        def leads() -> bool:
            found[:] = self._leaders()
            return bool(found)

        wait_until(leads, "a scheduler to lead")
        return found[0]

    def _leaders(self) -> Iterator[str]:
        for name in self.addresses:
            if name.startswith("scheduler") and self.processes[name].alive:
                reply = self.admin(name).ListServices(admin_pb2.ListServicesRequest(), timeout=WAIT_S)
                for service in reply.services:
                    if service.kind == "scheduler" and service.leader:
                        yield str(service.id)

    def wait_leader(self, timeout_s: float = WAIT_S) -> None:
        """Wait until a leader answers: after the leader was killed, for the rest of its lease."""

        def answers() -> bool:
            try:
                self.admin().GetShadow(admin_pb2.GetShadowRequest(), timeout=WAIT_S)
            except grpc.RpcError:
                return False
            return True

        wait_until(answers, "a scheduler to lead", timeout_s)

    def instances(self) -> dict[str, admin_pb2.InstanceInfo]:
        """Return the instances by ID, as the scheduler sees them."""
        reply = self.admin().ListInstances(admin_pb2.ListInstancesRequest(), timeout=WAIT_S)
        return {i.instance_id: i for i in reply.instances}

    def requests(self) -> list[admin_pb2.RequestInfo]:
        """Return the running requests, as the scheduler sees them."""
        return list(self.admin().ListRequests(admin_pb2.ListRequestsRequest(), timeout=WAIT_S).requests)

    def wait_instances(self, names: Sequence[str], timeout_s: float = WAIT_S) -> None:
        """Wait until exactly these instances are active and reporting."""
        active = types_pb2.INSTANCE_STATE_ACTIVE

        def ready() -> bool:
            for name in set(names) & self.processes.keys():
                if not self.processes[name].alive:
                    raise RuntimeError(f"{name} ended:\n{self.processes[name].text()[-3000:]}")
            seen = self.instances()
            return {n for n, i in seen.items() if i.state == active and i.kv_blocks_total} == set(names)

        wait_until(ready, f"instances {', '.join(names)}", timeout_s)

    def wait_request(
        self,
        part: str,
        output_tokens: int = 1,
        timeout_s: float = WAIT_S,
        ended: Callable[[], bool] = lambda: False,
    ) -> admin_pb2.RequestInfo:
        """Wait for a request whose ID contains `part` and that has this many output tokens; return it.

        Raise RequestEnded if it has `ended`, as its client sees it, before the scheduler has heard of that.
        """
        found: list[admin_pb2.RequestInfo] = []

        def ready() -> bool:
            over = ended()
            found[:] = [
                r for r in self.requests() if part in r.request_id and r.output_tokens >= output_tokens
            ]
            if over and not found:
                raise RequestEnded(f"{part!r} ended before it was seen to have {output_tokens} tokens")
            return bool(found)

        wait_until(ready, f"request {part!r} to have {output_tokens} tokens", timeout_s)
        return found[0]

    def find_request(self, part: str) -> admin_pb2.RequestInfo | None:
        """Return the first listed request whose ID contains `part`, or None."""
        return next((r for r in self.requests() if part in r.request_id), None)

    def wait_unlisted(self, part: str) -> list[admin_pb2.RequestInfo]:
        """Wait until the scheduler lists no request whose ID contains `part`; return the (empty) list."""
        wait_until(lambda: not [r for r in self.requests() if part in r.request_id], f"{part} to end")
        return [r for r in self.requests() if part in r.request_id]

    def wait_held(
        self, step: str, timeout_s: float = WAIT_S, ended: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until a worker logs that it holds at a fault point. Raise RequestEnded if what should hold has
        `ended` without."""

        def holds() -> bool:
            over = ended()
            if not (found := self._holds(step)) and over:
                raise RequestEnded(f"it ended, and nothing was held at {step}")
            return found

        wait_until(holds, f"a worker to hold at {step}", timeout_s)

    def _holds(self, step: str) -> bool:
        """Return whether a worker has held at a fault point since the last such hold."""
        if (count := self._held_lines(step)) > self._held.get(step, 0):
            self._held[step] = count
            return True
        return False

    def _held_lines(self, step: str) -> int:
        # The message ends with the line, or where a worker logs JSON, with its quotation mark.
        held = re.compile(rf'fault: holding at {re.escape(step)}["\n]')
        return sum(len(held.findall(p.text())) for n, p in self.processes.items() if n.startswith("w"))

    def migrations(self, part: str) -> list[migration_pb2.MigrationRecord]:
        """Return the migrations of requests whose ID contains `part`, oldest first."""
        reply = self.admin().ListMigrations(migration_pb2.ListMigrationsRequest(limit=1000), timeout=WAIT_S)
        found = [m for m in reply.migrations if part in m.request_id]
        return sorted(found, key=lambda m: m.opened_s)

    def wait_idle(self, timeout_s: float = WAIT_S) -> None:
        """Wait until no worker has a request or a used KV block, by their metrics, which each must have."""
        used = ("tailrace_worker_requests", "tailrace_worker_kv_blocks_used")

        def idle() -> bool:
            workers = [name for name, each in self.processes.items() if name.startswith("w") and each.alive]
            samples = [self._samples(name, metric) for name in workers for metric in used]
            return all(values and not any(values) for values in samples)

        wait_until(idle, "all KV to be freed", timeout_s)

    def metric(self, name: str, metric: str, labels: str = "") -> float:
        """Return the sum of a service's Prometheus samples of this name whose labels contain `labels`."""
        return sum(self._samples(name, metric, labels))

    def _samples(self, name: str, metric: str, labels: str = "") -> list[float]:
        """Return those samples; none if the service does not answer."""
        body = _get(f"http://127.0.0.1:{self.metrics_ports[name]}/metrics") or ""
        found = []
        for line in body.splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == metric and labels in series:
                found.append(float(value))
        return found

    def silences(self, name: str = "frontend") -> int:
        """Return how often a front end has taken a worker for lost because it sent nothing for seconds, as
        on a machine that is too busy; what it carries is recomputed then."""
        return len(re.findall(r"lost \S+: silent for", self.processes[name].text()))

    def late_placements(self, name: str = "frontend") -> float:
        """Return how many requests a front end has placed itself, since no scheduler answered in its second,
        as on a machine that is too busy."""
        return self.metric(name, "tailrace_frontend_placements_total", 'by="fallback"')

    # ---- controlling

    def migrate(self, request_id: str, target: str) -> migration_pb2.MigrationRecord:
        """Migrate a request, wait for the end and return the last record. Raise grpc.RpcError if refused.

        Ordered again as long as it is refused only for now (no scheduler leads, the target is suspect, the
        request is in prefill), and a few times if a process was too late for it: one was restarted, or is
        busy.
        """
        deadline_s = time.monotonic() + WAIT_S
        late = 0
        while True:
            try:
                record = self._order(request_id, target)
            except grpc.RpcError as error:
                for_now = is_refused_for_now(error) or any(reason in str(error) for reason in _NOT_YET)
                if not for_now or time.monotonic() > deadline_s:
                    raise
            else:
                late += 1
                if not any(reason in record.error for reason in _LATE) or late == TRIES:
                    return record
                print(f"migration to {target}: {record.error}")
            time.sleep(_PAUSE_S)

    def move(self, request_id: str, target: str) -> migration_pb2.MigrationRecord:
        """Migrate a request, which must be committed; return the record. Raise RequestEnded if it had
        ended."""
        record = self.migrate_running(request_id, target)
        assert record.state == types_pb2.MIGRATION_STATE_COMMITTED, record.error
        return record

    def migrate_running(self, request_id: str, target: str) -> migration_pb2.MigrationRecord:
        """Do as `migrate`. Raise RequestEnded if the request had ended."""
        try:
            record = self.migrate(request_id, target)
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.NOT_FOUND:
                raise RequestEnded(str(error.details())) from error
            raise
        if request_had_ended(record):
            raise RequestEnded(record.error)
        return record

    def _order(self, request_id: str, target: str) -> migration_pb2.MigrationRecord:
        record = migration_pb2.MigrationRecord()
        call = self.admin().Migrate(
            admin_pb2.AdminMigrateRequest(request_id=request_id, target_instance_id=target, reason="test"),
            timeout=WAIT_S,
        )
        for update in call:
            record = update
        return record

    def hold_migration(
        self,
        request_id: str,
        target: str,
        step: str,
        hold_s: float = 30.0,
        ended: Callable[[], bool] | None = None,
    ) -> threading.Thread:
        """Migrate a request until a worker holds at `step`; return the thread that waits for its end.

        An order that fails before that step is repeated: after a process was restarted, some others still
        know only the one before it, and for a moment nobody may lead. Raise RequestEnded with the reasons if
        the request has `ended` before (without it: is not listed), TimeoutError if none gets there.
        """
        gone = ended or (lambda: self.find_request(request_id) is None)
        self.arm({"hold": step, "seconds": hold_s})
        failures: list[str] = []
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            mover = threading.Thread(
                target=self._try_to_migrate, args=(request_id, target, failures), daemon=True
            )
            mover.start()
            while mover.is_alive() and time.monotonic() < deadline_s:
                if self._holds(step):
                    return mover
                mover.join(0.02)
            if self._holds(step):
                return mover
            if gone():
                self.disarm()
                raise RequestEnded(f"{request_id} was not held at {step}: {'; '.join(failures[-5:])}")
            time.sleep(_PAUSE_S)
        raise TimeoutError(f"no migration of {request_id} held at {step}: {'; '.join(failures[-5:])}")

    def _try_to_migrate(self, request_id: str, target: str, failures: list[str]) -> None:
        try:
            record = self._order(request_id, target)
            failures.append(f"{types_pb2.MigrationState.Name(record.state)} {record.error}")
        except (grpc.RpcError, LookupError) as failure:  # of any kind when a party is killed
            failures.append(str(failure))

    def arm(self, fault: Mapping[str, object]) -> None:
        """Arm a fault point in every worker (worker_agent/faults.py)."""
        if isinstance(step := fault.get("hold"), str):
            # Earlier holds at this point are not waited for any more.
            self._held[step] = self._held_lines(step)
        partial = self.faults.with_suffix(".partial")
        partial.write_text(json.dumps(fault))
        partial.replace(self.faults)

    def disarm(self) -> None:
        """Disarm all faults; held processes continue."""
        self.faults.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop every process, data path first."""
        for process in reversed(list(self.processes.values())):
            process.stop(5)
        shutil.rmtree(self.root / "etcd", ignore_errors=True)


def request_had_ended(record: migration_pb2.MigrationRecord) -> bool:
    """Return whether a migration failed because its request ended by itself, or was aborted by its client."""
    # A transfer may notice the end of its export before its source says why.
    return record.state == types_pb2.MIGRATION_STATE_GONE or record.error.endswith("the export has ended")


def _get(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as reply:
            return str(reply.read().decode())
    except OSError:
        return None


def _etcd_answers(port: int) -> bool:
    body = _get(f"http://127.0.0.1:{port}/health")
    return body is not None and '"true"' in body
