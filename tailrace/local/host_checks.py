"""What a host lacks for Tailrace: each check finds one thing, and says how to mend it."""

from __future__ import annotations

import email.utils
import enum
import json
import os
import re
import resource
import shutil
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tailrace import TESTED_VLLM
from tailrace.address import format_address
from tailrace.local.ports import PortUnavailable, require_free
from tailrace.local.requirements import INSTALL_VLLM, Missing, require_proxy, ucxx_version, vllm_version
from tailrace.model_folder import ModelFolderError, require_model, require_tokenizer
from tailrace.security.credentials import UnusableCredentials, read_credentials
from tailrace.service.probe import get_directly
from tailrace.tenancy.file import KeyFileUnusable, read_keys, readers_problem

_FILES: Final = 16_384
_SHARED_BYTES: Final = 1 << 30
_ROOM_BYTES: Final = 1 << 30
_EXPIRES_SOON_S: Final = 14 * 86_400.0
_SKEW_S: Final = 1.0
_SLOW_S: Final = 0.05
_ETCD_TRIES: Final = 5
_TIMEOUT_S: Final = 3.0
_OLDEST_ETCD: Final = (3, 4)
# Of a GPU's memory, what vLLM leaves to others.
_USABLE: Final = 0.9
# Bytes of weights from which a CPU makes some ten tokens a second at most.
_SLOW_ON_CPU: Final = 4_000_000_000


class Verdict(enum.StrEnum):
    """What a check came to."""

    OK = "ok"
    # Works, but not as well as it could, or not for everybody.
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result. `mend`: what to do; empty if nothing."""

    subject: str
    verdict: Verdict
    detail: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """What the checks look at. `root`: where /proc and /sys are."""

    environment: Mapping[str, str]
    root: Path = Path("/")
    gpus: tuple[str, ...] = ()
    # Memory of the smallest of them; 0: not known.
    gpu_bytes: int = 0
    model: str = ""
    # Devices of each worker.
    ranks: int = 1
    http: tuple[str, int] | None = None
    # Whether an edge is to run here.
    edge: bool = False
    etcd: tuple[str, ...] = ()
    certificates: Path | None = None
    api_keys: Path | None = None
    folder: Path = Path()


def ok(subject: str, detail: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(subject, Verdict.OK, detail)


def check_host(host: Host) -> Iterator[Finding]:
    """Yield what each check that applies finds."""
    for check in _CHECKS:
        yield from check(host)


def _packages(host: Host) -> Iterator[Finding]:
    installed = vllm_version()
    mend = INSTALL_VLLM
    if not installed:
        yield Finding("vLLM", Verdict.PROBLEM, "not installed: no worker and no front end can run here", mend)
    elif not installed.startswith(TESTED_VLLM):
        tested = f"{TESTED_VLLM[0]} to {TESTED_VLLM[-1]}"
        yield Finding("vLLM", Verdict.PROBLEM, f"{installed} is not tested", f"install {tested}")
    else:
        yield ok("vLLM", installed)
    transport = ucxx_version()
    yield (
        ok("UCX", transport) if transport else Finding("UCX", Verdict.PROBLEM, "ucxx is not installed", mend)
    )


def _proxy(host: Host) -> Iterator[Finding]:
    if not host.edge:
        return
    try:
        require_proxy()
    except Missing as error:
        yield Finding("edge", Verdict.PROBLEM, str(error), "install it, or put envoy on PATH")
    else:
        yield ok("edge", "Envoy is installed")


def _devices(host: Host) -> Iterator[Finding]:
    gpus = host.gpus
    if not gpus:
        detail = "no GPU: engines run on the CPU"
        if host.environment.get("CUDA_VISIBLE_DEVICES") == "":
            yield Finding("GPUs", Verdict.PROBLEM, "CUDA_VISIBLE_DEVICES is empty", "unset it")
        else:
            yield ok("GPUs", detail)
    elif len(gpus) < host.ranks:
        detail = f"{len(gpus)} visible, and a worker needs {host.ranks}"
        yield Finding("GPUs", Verdict.PROBLEM, detail, "--tensor-parallel-size, or CUDA_VISIBLE_DEVICES")
    else:
        yield ok("GPUs", f"{len(gpus)}: {len(gpus) // host.ranks} workers")
    for governor in sorted(host.root.glob("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")):
        if (mode := governor.read_text().strip()) == "powersave":
            yield Finding(
                "CPU governor", Verdict.NOTE, mode, "cpupower frequency-set -g performance: shorter steps"
            )


def _model(host: Host) -> Iterator[Finding]:
    if not host.model:
        return
    folder = Path(host.model).expanduser()
    try:
        require_model(host.model)
        require_tokenizer(host.model)
    except ModelFolderError as error:
        yield Finding("model", Verdict.PROBLEM, str(error), "name a folder with a model, or one of a hub")
        return
    if not folder.is_dir():
        where = "HF_HOME" if "HF_HOME" in host.environment else "the home directory"
        detail = f"not checked: {host.model} is no folder here, and vLLM takes it from a hub, into {where}"
        yield Finding("model", Verdict.NOTE, detail, f"hf download {host.model} fetches it before")
        return
    needed = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    memory = re.search(r"MemAvailable:\s+(\d+)", (host.root / "proc/meminfo").read_text())
    available = int(memory[1]) << 10 if memory else 0
    if needed and not host.gpus and needed > _USABLE * available:
        detail = f"weights of {needed / 1e9:.1f} GB, and {available / 1e9:.1f} GB of memory are available"
        yield Finding("model", Verdict.PROBLEM, detail, "a smaller or quantized model, or another machine")
    elif host.gpus and host.gpu_bytes and needed > _USABLE * host.gpu_bytes * host.ranks:
        has = f"{host.ranks} x {host.gpu_bytes / 1e9:.0f} GB"
        detail = f"weights of {needed / 1e9:.1f} GB, and a worker has {has}"
        yield Finding("model", Verdict.PROBLEM, detail, "--tensor-parallel-size, or a quantized model")
    elif needed > _SLOW_ON_CPU and not host.gpus:
        detail = f"weights of {needed / 1e9:.1f} GB and no GPU: each token takes as long as to read them all"
        mend = "a smaller model for a first try, or a machine with GPUs"
        yield Finding("model", Verdict.NOTE, detail, mend)
    else:
        yield ok("model", f"{host.model}, {needed / 1e9:.1f} GB of weights")


def _limits(host: Host) -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if files != resource.RLIM_INFINITY and files < _FILES:
        mend = f"ulimit -n {_FILES}; LimitNOFILE= in units, ulimits: nofile in containers"
        yield Finding("file limit", Verdict.PROBLEM, f"{files} open files; each stream takes some", mend)
    else:
        yield ok("file limit", "unlimited" if files == resource.RLIM_INFINITY else str(files))
    ports = [port.parent.parent.name for port in host.root.glob("sys/class/infiniband/*/ports/*")]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if not ports:
        yield ok("RDMA", "no device: KV goes over TCP, and shared memory on one host")
    elif locked != resource.RLIM_INFINITY:
        mend = "ulimit -l unlimited; LimitMEMLOCK=infinity in units, ulimits: memlock: -1 in containers"
        yield Finding("RDMA", Verdict.PROBLEM, f"memory locks are limited to {locked} bytes", mend)
    else:
        yield ok("RDMA", ", ".join(sorted(set(ports))))
    shared = shutil.disk_usage(host.root / "dev/shm").total
    if shared < _SHARED_BYTES:
        mend = "shm_size: 1gb in containers, or mount -o remount,size=1g /dev/shm"
        yield Finding("shared memory", Verdict.PROBLEM, f"{shared >> 20} MiB: KV goes through it", mend)
    else:
        yield ok("shared memory", f"{shared / 1e9:.1f} GB")


def _network(host: Host) -> Iterator[Finding]:
    known = {path.name for path in host.root.glob("sys/class/net/*")}
    known |= {path.name for path in host.root.glob("sys/class/infiniband/*")}
    given = host.environment.get("UCX_NET_DEVICES", "")
    missing = [
        name for name in given.split(",") if given not in ("", "all") and name.split(":")[0] not in known
    ]
    if missing:
        mend = f"unset it, or name devices that are here: {', '.join(sorted(known))}"
        yield Finding("UCX_NET_DEVICES", Verdict.PROBLEM, f"no device {', '.join(missing)}", mend)
    if host.http is not None:
        try:
            require_free(*host.http)
        except PortUnavailable as error:
            detail, _, mend = str(error).partition("; ")
            yield Finding("HTTP port", Verdict.PROBLEM, detail, mend or "choose another with --port")
        else:
            yield ok("HTTP port", f"{format_address(*host.http)} is free")


def _folders(host: Host) -> Iterator[Finding]:
    folder = next(each for each in (host.folder, *host.folder.absolute().parents) if each.exists())
    if not os.access(folder, os.W_OK):
        yield Finding(
            "disk", Verdict.PROBLEM, f"{folder} cannot be written", "TAILRACE_RUN_DIR names another"
        )
        return
    free = shutil.disk_usage(folder).free
    if free < _ROOM_BYTES:
        detail = f"{free / 1e6:.0f} MB free in {folder}, for etcd and logs"
        yield Finding("disk", Verdict.PROBLEM, detail, "free some, or TAILRACE_RUN_DIR names another folder")
    else:
        yield ok("disk", f"{free / 1e9:.0f} GB free")


def _certificates(host: Host) -> Iterator[Finding]:
    if host.certificates is None:
        return
    mend = "tailrace certs rotate (or issue), and copy the folder again"
    try:
        credentials = read_credentials(host.certificates)
    except UnusableCredentials as error:
        yield Finding("certificate", Verdict.PROBLEM, str(error), mend)
        return
    left_s = credentials.end_s - time.time()
    detail = f"{credentials.identity.role.value}, ends in {left_s / 86_400:.0f} days"
    soon = left_s < _EXPIRES_SOON_S
    yield Finding("certificate", Verdict.PROBLEM, detail, mend) if soon else ok("certificate", detail)


def _keys(host: Host) -> Iterator[Finding]:
    if host.api_keys is None:
        return
    try:
        keys = read_keys(host.api_keys)
        problem = readers_problem(host.api_keys)
    except (KeyFileUnusable, OSError) as error:
        detail, _, mend = str(error).partition("; ")
        yield Finding("API keys", Verdict.PROBLEM, detail, mend or "make it a readable file, or name another")
        return
    if problem:
        yield Finding("API keys", Verdict.NOTE, problem, "chgrp it to the front end's group")
    elif not keys.tenants:
        mend = f"tailrace keys make TEAM --file {host.api_keys}"
        yield Finding("API keys", Verdict.PROBLEM, f"{host.api_keys} has no key: nobody is served", mend)
    else:
        yield ok("API keys", f"{len(keys.tenants)} tenants")


def _etcd(host: Host) -> Iterator[Finding]:
    for member in host.etcd:
        scheme = "http" if host.certificates is None else "https"
        try:
            answers = [_get(f"{scheme}://{member}/version", host.certificates) for _ in range(_ETCD_TRIES)]
        except (OSError, ValueError, ssl.SSLError) as error:
            reason = " ".join(str(getattr(error, "reason", error)).split())
            mend = "start it, open its port, or correct --etcd (with certificates: --tls DIR)"
            yield Finding(f"etcd {member}", Verdict.PROBLEM, reason, mend)
            continue
        yield from _etcd_findings(member, answers)


@dataclass(frozen=True, slots=True)
class _Answer:
    body: bytes
    seconds: float
    # How far its clock is ahead of ours, in seconds, to within one; None: it does not say.
    skew_s: float | None


def _etcd_findings(member: str, answers: Sequence[_Answer]) -> Iterator[Finding]:
    subject, first = f"etcd {member}", answers[0]
    try:
        release = str(json.loads(first.body)["etcdserver"])
        major, minor = (int(each) for each in release.split(".")[:2])
    except (KeyError, TypeError, ValueError):
        yield Finding(subject, Verdict.PROBLEM, "does not answer as etcd does", "correct --etcd")
        return
    latency_s = sorted(each.seconds for each in answers)[len(answers) // 2]
    if (major, minor) < _OLDEST_ETCD:
        yield Finding(subject, Verdict.PROBLEM, f"version {release}", "3.5 or later")
    elif latency_s > _SLOW_S:
        mend = "a disk of its own for etcd, or a nearer member"
        yield Finding(subject, Verdict.PROBLEM, f"answers in {latency_s * 1e3:.0f} ms", mend)
    else:
        yield ok(subject, f"{release}, {latency_s * 1e3:.1f} ms")
    # HTTP tells whole seconds.
    if first.skew_s is not None and abs(first.skew_s) > 1.0 + _SKEW_S:
        detail = f"{abs(first.skew_s):.0f} s {'behind' if first.skew_s > 0 else 'ahead of'} {member}'s"
        mend = "timedatectl set-ntp true: certificates and traces depend on it"
        yield Finding("clock", Verdict.PROBLEM, detail, mend)


def _get(url: str, certificates: Path | None) -> _Answer:
    """GET a URL. Raise OSError, ValueError or ssl.SSLError."""
    context = None
    if certificates is not None:
        credentials = read_credentials(certificates)
        context = (credentials.etcd or credentials).client_context
    begun_s = time.monotonic()
    with get_directly(url, _TIMEOUT_S, context) as reply:
        body = reply.read(1 << 16)
        date = reply.headers.get("Date")
    seconds = time.monotonic() - begun_s
    told = None if date is None else email.utils.parsedate_to_datetime(date).timestamp()
    return _Answer(body, seconds, None if told is None else told - time.time())


def _environment(host: Host) -> Iterator[Finding]:
    passed = sorted(
        name for name in host.environment if name.startswith(("VLLM_", "HF_", "UCX_", "TAILRACE_"))
    )
    yield ok("environment", ", ".join(passed) or "nothing for vLLM, Hugging Face, UCX or Tailrace")
    if not host.environment.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        mend = "OTEL_EXPORTER_OTLP_ENDPOINT=http://MONITOR for all services (tailrace up sets it)"
        yield Finding("tracing", Verdict.NOTE, "off: tailrace trace finds nothing", mend)


_CHECKS: Final[tuple[Callable[[Host], Iterator[Finding]], ...]] = (
    _packages,
    _proxy,
    _devices,
    _model,
    _limits,
    _network,
    _folders,
    _certificates,
    _keys,
    _etcd,
    _environment,
)
