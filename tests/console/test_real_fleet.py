"""The console of a real fleet on simulated engines, with a model that has a policy of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tailrace.tiny import MODEL_PATH
from tests.console.browser import CHROMIUM, Page, browsing
from tests.harness.processes import FAST_FRONT, wait_until
from tests.harness.working_folder import WorkingFolder

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)"),
]


@pytest.fixture
def here(tmp_path: Path) -> Iterator[WorkingFolder]:
    place = WorkingFolder(tmp_path)
    yield place
    place.tailrace("down")


# Three models, two clusters, an edge and certificates, on two cores.
_UP_S: Final = 480.0


def _model(path: str, name: str, **more: Any) -> dict[str, Any]:
    flags = {"served-model-name": name, "sim": ["speed=1"]}
    return {"model": path, "engine": "simulated", "front": FAST_FRONT, "flags": flags, **more}


def _read(here: WorkingFolder, *command: str) -> Any:
    done = here.tailrace("get", *command, "-o", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def _confirmed(page: Page, button: str, said: str, place: str = "#said") -> None:
    await page.evaluate(f"document.querySelector({button!r}).click()")
    await page.wait("document.querySelector('#confirm').open")
    await page.evaluate("document.querySelector('#confirm-do').click()")
    await page.wait(f"document.querySelector({place!r}).textContent.includes({said!r})")


async def test_models_are_shown_and_set_each_in_its_cluster(here: WorkingFolder) -> None:
    other = str(shutil.copytree(MODEL_PATH, here.path / "other"))
    own = _model(str(MODEL_PATH), "second", policy={"name": "pascal"}, replicas=2)
    models = [_model(str(MODEL_PATH), "tiny"), _model(other, "third"), own]
    fleet = {
        "models": models,
        "http": f"127.0.0.1:{here.port}",
        "policy": {"name": "least_loaded"},
        "tls": True,
    }
    (here.path / "fleet.yaml").write_text(yaml.safe_dump(fleet))
    up = here.tailrace("up", "-f", "fleet.yaml", timeout_s=_UP_S)
    assert up.returncode == 0, up.stderr
    console = next(part.spec for part in here.state().parts if part.name == "console")
    assert console is not None
    token = here.folder.path / "data" / "console.token"
    wait_until(token.exists, "the console")
    async with browsing() as page:
        await page.open(f"http://{console.address}/#token={token.read_text().strip()}")
        await page.wait("document.querySelector('#cluster').options.length === 2")
        options = "[...document.querySelector('#cluster').options].map((option) => option.text)"
        assert await page.evaluate(options) == ["default (third, tiny)", "default.second (second)"]
        label = "document.querySelector('#lanes-base').getAttribute('aria-label')"
        await page.wait(f"{label}.startsWith('2 instances of 2 models')")
        await page.evaluate("location.hash = '#/in/default.second/fleet/second-worker-0'")
        await page.wait(f"{label}.startsWith('2 instances as lanes')")
        await page.wait("document.querySelector('#instance select')")
        await page.evaluate("document.querySelector('#instance select').value = 'decode'")
        await _confirmed(page, "#instance form button", "pool of second-worker-0: decode")
        await page.evaluate("location.hash = '#/in/default.second/settings'")
        await page.wait("document.querySelector('#slo [name=ttft]').value")
        await page.evaluate("document.querySelector('#slo [name=ttft]').focus()")
        await page.write("7s")
        await _confirmed(page, "#slo [type=submit]", "SLOs: ttft=7s")
        await page.evaluate("document.querySelector('#add-stage').click()")
        for text in ("0", "9000", "nobody"):
            await page.write(text)
            await page.key("Tab", 9)
        await _confirmed(page, "#stages [type=submit]", "no instance", "#stages-error")
        # The scheduler's own words, at the field that they name.
        assert await page.evaluate("document.activeElement.name") == "stages[0].instance_ids"
        await page.write("second-worker-0, second-worker-1")
        await _confirmed(page, "#stages [type=submit]", "stages: 1")
        await page.evaluate("location.hash = '#/in/default.second/policies'")
        await page.wait("document.querySelector('.policy[data-name=round_robin] button')")
        await _confirmed(page, ".policy[data-name=round_robin] button", "round_robin is the policy")
        problems = [each for each in page.problems if "status of 404" not in each]
        assert problems == []
    second = ("--model", "second")
    assert _read(here, "slo", *second)["slo"]["ttft_s"] == 7.0 and _read(here, "slo")["slo"]["ttft_s"] == 2.0
    pools = {each["instance_id"]: each["pool"] for each in _read(here, "instances", *second)["instances"]}
    assert pools == {"second-worker-0": "decode", "second-worker-1": None}
    assert [(each["lo"], each["hi"]) for each in _read(here, "stages", *second)["stages"]] == [(0, 9000)]
    active = [
        [each["name"] for each in _read(here, "policies", *arguments)["policies"] if each["active"]]
        for arguments in ((), second)
    ]
    assert active == [["least_loaded"], ["round_robin"]]
    log = (here.folder.path / "logs" / "console.log").read_text()
    lines = [json.loads(line[line.index("{") :]) for line in log.splitlines() if '"what"' in line]
    assert [(each["what"], each["outcome"]) for each in lines] == [
        ("SetPool", "OK"),
        ("SetSlo", "OK"),
        ("SetStages", "NOT_FOUND"),
        ("SetStages", "OK"),
        ("SetPolicy", "OK"),
    ]
    asked = {(each["who"], each["request"]["cluster"]) for each in lines}
    assert asked == {("admin/local", "default.second")}
