"""`/ready` tells a load balancer whether any instance takes requests; `/health` is the front end's own."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path

import pytest

from frontend_svc.admission import NO_INSTANCE
from tailrace.v1 import admin_pb2
from tests.e2e.conftest import RUST_FRONT
from tests.harness.fleet import Fleet
from tests.harness.processes import wait_until
from tests.harness.tries import once_available
from tests.waiting import WAIT_S

pytestmark = pytest.mark.fleet


def get(url: str) -> tuple[int, str]:
    """Return the status and the body; status 0 while nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


def wait_ready(fleet: Fleet, ready: bool, *ports: str) -> None:
    """Wait until /ready of the front end says so, on its metrics port and on these, and its metric too; it is
    alive all along."""
    urls = [f"{port}/ready" for port in (metrics_port(fleet), *ports)]
    status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE

    def is_so() -> bool:
        assert get(f"{fleet.http}/health")[0] == HTTPStatus.OK
        unready = fleet.metric("frontend", "tailrace_frontend_unready")
        return all(get(url)[0] == status for url in urls) and unready == (not ready)

    wait_until(is_so, f"/ready to answer {status.value}", WAIT_S)


def metrics_port(fleet: Fleet) -> str:
    return f"http://127.0.0.1:{fleet.metrics_ports['frontend']}"


def drain(fleet: Fleet, *instances: str, undo: bool = False) -> None:
    for instance in instances:
        request = admin_pb2.DrainRequest(instance_id=instance, undrain=undo)
        once_available(lambda: list(fleet.admin().Drain(request, timeout=WAIT_S)))  # noqa: B023


def test_unready_while_all_instances_are_drained(simulated_fleet: Fleet) -> None:
    wait_ready(simulated_fleet, True)
    first, *others = simulated_fleet.instances()
    try:
        drain(simulated_fleet, *others)
        wait_ready(simulated_fleet, True)
        drain(simulated_fleet, first)
        wait_ready(simulated_fleet, False)
    finally:
        drain(simulated_fleet, first, *others, undo=True)
    wait_ready(simulated_fleet, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "front",
    [
        "python",
        pytest.param("rust", marks=pytest.mark.skipif(not RUST_FRONT.exists(), reason="no vllm-rs")),
    ],
)
def test_ready_while_an_instance_takes_requests(tmp_path: Path, front: str) -> None:
    fleet = Fleet(tmp_path, "simulated")
    try:
        fleet.start_control()
        fleet.start_frontend(front, wait=False)
        url = f"{metrics_port(fleet)}/ready"
        wait_until(lambda: NO_INSTANCE.message in get(url)[1], "the fleet to have no instance", WAIT_S)
        status, body = get(url)
        assert (status, json.loads(body)["error"]["code"]) == (503, 503)
        fleet.start_worker("w0")
        fleet.wait_frontend("frontend")
        ports = [fleet.http] if front == "python" else []
        wait_ready(fleet, True, *ports)
        drain(fleet, "w0")
        wait_ready(fleet, False, *ports)
        drain(fleet, "w0", undo=True)
        wait_ready(fleet, True, *ports)
        fleet.processes["w0"].freeze()
        wait_ready(fleet, False, *ports)
        fleet.processes["w0"].thaw()
        wait_ready(fleet, True, *ports)
    finally:
        fleet.close()
