"""The console of a real fleet on simulated engines: two models in its cluster, and one with a policy of its
own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tailrace.tiny import MODEL_PATH
from tailrace.v1 import admin_pb2 as admin
from tailrace.v1 import types_pb2
from tests.console.browser import CHROMIUM, Page, browsing
from tests.harness.fleet import Fleet
from tests.harness.processes import wait_until
from tests.ports import free_port
from tests.waiting import WAIT_S

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)"),
]

OTHER: Final = "default.second"
WORKER: Final = f"{OTHER}-worker"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, "simulated")
    try:
        fleet.start_control()
        fleet.start_worker("worker-0")
        fleet.start_worker("worker-1", model=str(shutil.copytree(MODEL_PATH, tmp_path / "third")))
        fleet.start_model_cluster(OTHER)
        yield fleet
    finally:
        fleet.close()


@pytest.fixture
def console(fleet: Fleet) -> Iterator[tuple[str, Path]]:
    """Yield the URL of a console and its log."""
    url, log = f"127.0.0.1:{free_port()}", fleet.root / "console.log"
    command = [sys.executable, "-m", "tailrace", "serve", "console", "--http", url]
    with log.open("wb") as file:
        address = fleet.addresses["scheduler-0"]
        process = subprocess.Popen([*command, "--admin", address], stdout=file, stderr=file)
        try:
            wait_until(lambda: b"the console of" in log.read_bytes(), "the console")
            yield f"http://{url}", log
        finally:
            process.terminate()
            process.wait(WAIT_S)


async def _confirmed(page: Page, button: str, said: str, place: str = "#said") -> None:
    await page.evaluate(f"document.querySelector({button!r}).click()")
    await page.wait("document.querySelector('#confirm').open")
    await page.evaluate("document.querySelector('#confirm-do').click()")
    await page.wait(f"document.querySelector({place!r}).textContent.includes({said!r})")


async def test_models_are_shown_and_set_each_in_its_cluster(fleet: Fleet, console: tuple[str, Path]) -> None:
    url, log = console
    async with browsing() as page:
        await page.open(url)
        await page.wait("document.querySelector('#cluster').options.length === 2")
        options = "[...document.querySelector('#cluster').options].map((option) => option.text)"
        assert await page.evaluate(options) == ["default", OTHER]
        label = "document.querySelector('#lanes-base').getAttribute('aria-label')"
        await page.wait(f"{label}.startsWith('2 instances of 2 models')")
        await page.evaluate(f"location.hash = '#/in/{OTHER}/fleet/{WORKER}'")
        await page.wait(f"{label}.startsWith('1 instances as lanes')")
        await page.wait("document.querySelector('#instance select')")
        await page.evaluate("document.querySelector('#instance select').value = 'decode'")
        await _confirmed(page, "#instance form button", f"pool of {WORKER}: decode")
        await page.evaluate(f"location.hash = '#/in/{OTHER}/settings'")
        await page.wait("document.querySelector('#slo [name=ttft]').value")
        await page.evaluate("document.querySelector('#slo [name=ttft]').focus()")
        await page.write("7s")
        await _confirmed(page, "#slo [type=submit]", "SLOs: ttft=7s")
        await page.evaluate("document.querySelector('#add-stage').click()")
        for text in ("0", "9000", "nobody"):
            await page.write(text)
            await page.key("Tab", 9)
        # The scheduler's own words, at the field that they name.
        await _confirmed(page, "#stages [type=submit]", "no instance", "#stages-error")
        assert await page.evaluate("document.activeElement.name") == "stages[0].instance_ids"
        await page.write(WORKER)
        await _confirmed(page, "#stages [type=submit]", "stages: 1")
        await page.evaluate(f"location.hash = '#/in/{OTHER}/policies'")
        await page.wait("document.querySelector('.policy[data-name=round_robin] button')")
        await _confirmed(page, ".policy[data-name=round_robin] button", "round_robin is the policy")
        assert [each for each in page.problems if "status of 404" not in each] == []
    second, own = fleet.admin(f"{OTHER}-scheduler"), fleet.admin()
    assert second.GetSlo(admin.GetSloRequest(), timeout=WAIT_S).slo.ttft_s == 7.0
    assert own.GetSlo(admin.GetSloRequest(), timeout=WAIT_S).slo.ttft_s == 2.0
    (instance,) = second.ListInstances(admin.ListInstancesRequest(), timeout=WAIT_S).instances
    assert (instance.instance_id, instance.pool) == (WORKER, types_pb2.POOL_DECODE)
    (stage,) = second.ListStages(admin.ListStagesRequest(), timeout=WAIT_S).stages
    assert (stage.lo, stage.hi, list(stage.instance_ids)) == (0, 9000, [WORKER])
    assert not own.ListStages(admin.ListStagesRequest(), timeout=WAIT_S).stages
    active = [
        [
            policy.name
            for policy in stub.ListPolicies(admin.ListPoliciesRequest(), timeout=WAIT_S).policies
            if policy.active
        ]
        for stub in (own, second)
    ]
    assert active == [["least_loaded"], ["round_robin"]]
    lines = [json.loads(line[line.index("{") :]) for line in log.read_text().splitlines() if '"what"' in line]
    assert [(each["what"], each["outcome"]) for each in lines] == [
        ("SetPool", "OK"),
        ("SetSlo", "OK"),
        ("SetStages", "NOT_FOUND"),
        ("SetStages", "OK"),
        ("SetPolicy", "OK"),
    ]
    assert {(each["who"], each["request"]["cluster"]) for each in lines} == {("local", OTHER)}
