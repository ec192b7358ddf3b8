"""The console's page in headless Chromium, before an admin API that replies from a script."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import grpc
import psutil
import pytest

from tailrace.v1 import admin_pb2 as admin
from tailrace.v1 import types_pb2
from tests.cli.scripted_admin import Script, serving, small_fleet
from tests.console.browser import CHROMIUM, Page, browsing
from tests.console.fleets import MovingFleet, eventful_life
from tests.harness.servers import wait_until_up
from tests.ports import free_port
from tests.waiting import WAIT_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)"),
]

MARKUP: Final = '<img src="x" onerror="document.title=1"><script>document.title=1</script>'
# What an element's text needs to be read against what is behind it (WCAG 2, level AA).
_CONTRAST: Final = """
(() => {
  const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  const bad = [];
  for (const e of document.querySelectorAll('body *')) {
    if (!e.offsetParent || e.closest('svg') || e.disabled) continue;
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) bad.push(`${e.tagName} ${e.textContent.slice(0, 20)} ${ratio.toFixed(2)}`);
  }
  return bad;
})()
"""

_UNNAMED: Final = """
[...document.querySelectorAll('button, a, input, select, canvas:not([aria-hidden])')]
  .filter((e) => !(e.textContent.trim() || e.labels?.length || e.getAttribute('aria-label')))
  .map((e) => e.outerHTML)
"""


@contextmanager
def console(admin: str, url: str) -> Iterator[psutil.Process]:
    """Run a console as a process during the block."""
    command = [sys.executable, "-m", "tailrace", "serve", "console", "--admin", admin]
    process = subprocess.Popen([*command, "--http", url.removeprefix("http://")])
    try:
        assert wait_until_up(f"{url}/health", process, WAIT_S)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(WAIT_S)


@contextmanager
def running(script: Script) -> Iterator[tuple[str, psutil.Process]]:
    """Run a console before a scripted admin API during the block; yield its URL and its process."""
    url = f"http://127.0.0.1:{free_port()}"
    with serving(script) as address, console(address, url) as process:
        yield url, process


@asynccontextmanager
async def opened(script: Script, view: str = "", refused: int = 0) -> AsyncIterator[Page]:
    """Open a view of a console during the block; afterwards there were no problems, other than replies with
    the status `refused`."""
    with running(script) as (url, _):
        async with browsing() as page:
            await page.open(f"{url}/{view}")
            await page.wait("document.querySelector('#link').textContent.includes(' as local')")
            yield page
            expected = f"status of {refused} "
            assert [each for each in page.problems if expected not in each] == []


_FRAMES: Final = """
new Promise((done) => {
  const began = performance.now();
  let [last, count, longest] = [began, 0, 0];
  const frame = (now) => {
    count += 1;
    longest = Math.max(longest, now - last);
    last = now;
    if (now - began < 10000) requestAnimationFrame(frame);
    else done([count / (now - began) * 1000, longest]);
  };
  requestAnimationFrame(frame);
})
"""


async def test_a_large_fleet_at_thirty_frames_a_second() -> None:
    fleet = MovingFleet(instances=256, requests=5_000)
    with fleet.moving(), running(fleet.script) as (url, process):
        async with browsing() as page:
            await page.open(url)
            await page.wait("document.querySelector('#figures')?.textContent.includes('5,000')")
            before, began_s = process.cpu_times(), time.monotonic()
            frames, longest_ms = await page.evaluate(_FRAMES)
            after, seconds = process.cpu_times(), time.monotonic() - began_s
            lanes = await page.evaluate("document.querySelector('#lanes-base').getAttribute('aria-label')")
            assert page.problems == []
        memory = process.memory_info().rss
    cpu = (after.user + after.system - before.user - before.system) / seconds
    print(
        f"\n256 instances, 5,000 requests: {frames:.1f} frames/s, the longest {longest_ms:.0f} ms; "
        f"the console takes {100 * cpu:.1f}% of a core and {memory / 1e6:.0f} MB"
    )
    assert lanes.startswith("256 instances")
    assert frames >= 30


_PAINTED: Final = """
(() => {
  const canvas = document.querySelector('#lanes-moves');
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  return data.some((value) => value > 0);
})()
"""


async def test_a_move_is_an_arrow_when_it_happens() -> None:
    script = small_fleet()
    async with opened(script) as page:
        await page.wait("document.querySelector('#legend').textContent.includes('reasoning 1')")
        assert not await page.evaluate(_PAINTED)
        # An arrow stays for so many frames: a busy browser may draw none of them within the usual seconds.
        await page.evaluate("(() => { let at = 0; performance.now = () => at += 10; })()")
        moved = admin.RequestInfo()
        moved.CopyFrom(script.requests[0])
        moved.instance_id, moved.epoch = "worker-1", 3
        script.requests[0] = moved
        await page.wait(_PAINTED)
        # And nothing is left of it.
        await page.evaluate("delete performance.now")
        await page.wait(f"!{_PAINTED.lstrip()}")


_SAID: Final = "document.querySelector('#said').textContent"
_CHANGES: Final = "document.querySelector('#confirm-changes').textContent"
_LANES: Final = "document.querySelector('#lanes-base').getAttribute('aria-label')"
_MADE_OF_MARKUP: Final = "document.querySelectorAll('body img, body script').length"


async def test_names_are_text_and_never_markup() -> None:
    script = small_fleet()
    script.clusters = [
        admin.ClusterInfo(name=f"{MARKUP}{number}", models=[MARKUP], admin_addresses=["127.0.0.1:1"])
        for number in range(2)
    ]
    script.stages[0].instance_ids.append(MARKUP)
    script.instances[0].model = f"{MARKUP} 2"
    script.shadow = admin.Shadow(
        name=MARKUP, policy=MARKUP, counts=[admin.ShadowCount(point=MARKUP)], suspended=MARKUP
    )
    script.errors["SetSlo"] = (grpc.StatusCode.INVALID_ARGUMENT, f"ttft: {MARKUP}")
    script.instances.append(
        admin.InstanceInfo(instance_id=MARKUP, model=MARKUP, state=types_pb2.INSTANCE_STATE_SUSPECT)
    )
    script.requests.append(admin.RequestInfo(request_id=MARKUP, instance_id=MARKUP))
    script.policies.append(admin.PolicyInfo(name=MARKUP, summary=MARKUP))
    script.policies[0].suspended = MARKUP
    script.migrations[0].error = MARKUP
    async with opened(script, refused=400) as page:
        await page.evaluate("document.querySelector('#show-table').click()")
        for view in (
            "fleet",
            "requests",
            "moves",
            "policies",
            "alerts",
            "request/' + encodeURIComponent(markup) + '",
        ):
            await page.evaluate(f"(() => {{ const markup = {MARKUP!r}; location.hash = '#/{view}'; }})()")
            await page.wait("document.querySelector('main').textContent.includes('onerror')")
            assert await page.evaluate(_MADE_OF_MARKUP) == 0
        await page.evaluate("location.hash = '#/settings'")
        await page.wait("document.querySelectorAll('#stages fieldset').length === 1")
        await page.evaluate("document.querySelector('#slo [name=ttft]').focus()")
        await page.write(MARKUP)
        await page.key("Enter", 13)
        await page.wait("document.querySelector('#confirm').open")
        assert MARKUP in await page.evaluate(_CHANGES)
        assert await page.evaluate(_MADE_OF_MARKUP) == 0
        await page.evaluate("document.querySelector('#confirm-do').click()")
        await page.wait("document.querySelector('#slo-error').textContent.includes('ttft')")
        await page.evaluate("location.hash = `#/fleet/${encodeURIComponent('worker-0')}`")
        await page.wait("document.querySelector('#cluster').options.length === 2")
        assert MARKUP in await page.evaluate("document.querySelector('#cluster').textContent")
        assert await page.evaluate(_MADE_OF_MARKUP) == 0
        # A cluster's name is in the address, too.
        await page.evaluate(
            "(() => { const choice = document.querySelector('#cluster'); choice.selectedIndex = 1;"
            "choice.dispatchEvent(new Event('change')); })()"
        )
        await page.wait("document.querySelector('#link').textContent.includes('127.0.0.1:1 as')")
        assert await page.evaluate(_MADE_OF_MARKUP) == 0
        assert "Tailrace console" in await page.evaluate("document.title")


async def test_a_lost_console_is_shown_and_found_again() -> None:
    with serving(small_fleet()) as address:
        url = f"http://127.0.0.1:{free_port()}"
        async with browsing() as page:
            with console(address, url):
                await page.open(url)
                await page.wait("document.querySelector('#link').textContent.includes(' as local')")
            await page.wait("document.querySelector('#link').textContent === 'no connection to the console'")
            with console(address, url):
                await page.wait("document.querySelector('#link').textContent.includes(' as local')")


async def test_one_request_with_two_moves_and_a_loss() -> None:
    script = small_fleet()
    script.traces, script.migrations = eventful_life("r-1", time.time() - 12)
    async with opened(script, "#/request/r-1") as page:
        await page.wait("document.querySelectorAll('#life .moved').length === 2")
        assert await page.evaluate("document.querySelectorAll('#life line.lost').length") == 1
        label = await page.evaluate("document.querySelector('#life svg').getAttribute('aria-label')")
        assert label.endswith("placed worker-0, moved worker-1, lost , placed worker-2, moved worker-3")
        assert await page.evaluate("document.querySelectorAll('#request-moves tbody tr').length") == 2
        assert await page.evaluate("document.querySelectorAll('#spans tbody tr').length") == 8


async def test_an_instance_is_drained_with_the_keyboard() -> None:
    script = small_fleet()
    async with opened(script) as page:
        await page.evaluate("document.querySelector('#show-table').focus()")
        await page.key("Enter", 13)
        await page.wait("document.querySelector('#instances a')")
        for _ in range(2):  # the order, and then the first instance
            await page.key("Tab", 9)
        assert await page.evaluate("document.activeElement.textContent") == "worker-0"
        await page.key("Enter", 13)
        await page.wait("document.querySelector('#instance button')")
        await page.evaluate("document.querySelector('#instance button').focus()")
        await page.key("Enter", 13)
        await page.wait("document.querySelector('#confirm').open")
        await page.key("Tab", 9)
        assert await page.evaluate("document.activeElement.textContent") == "Drain"
        await page.key("Enter", 13)
        await page.wait("document.querySelector('#said').textContent.includes('worker-0 drains')")
    assert [
        request.instance_id for request in script.received if isinstance(request, admin.DrainRequest)
    ] == ["worker-0"]


async def test_a_policy_is_set_with_parameters() -> None:
    script = small_fleet()
    parameter = admin.PolicyParameter(name="quantum_tokens", type="int", default="500", allowed="1 or more")
    script.policies[1].parameters.append(parameter)
    async with opened(script, "#/policies") as page:
        await page.wait("document.querySelectorAll('.policy').length === 2")
        await page.evaluate(
            "(() => { const panel = document.querySelectorAll('.policy')[1]; panel.open = true;"
            "panel.querySelector('input').value = '250'; panel.querySelector('button').click();"
            "document.querySelector('#confirm-do').click(); })()"
        )
        await page.wait("document.querySelector('#said').textContent.includes('round_robin is the policy')")
    (request,) = (r for r in script.received if isinstance(r, admin.SetPolicyRequest))
    assert (request.name, dict(request.parameters)) == ("round_robin", {"quantum_tokens": "250"})


async def test_a_policy_keeps_its_order_and_the_question_says_what_changes() -> None:
    script = small_fleet()
    script.policies[0].name = "pascal+earliest_due"
    for name, value in (("quantum_tokens", "250"), ("pacer", "false")):
        script.policies[0].parameters.append(
            admin.PolicyParameter(name=name, type="str", default="500", value=value, allowed="any")
        )
    refused = "parameters: policy 'pascal', parameter 'quantum_tokens': 'x' is not allowed"
    script.errors["SetPolicy"] = (grpc.StatusCode.INVALID_ARGUMENT, refused)
    async with opened(script, "#/policies", refused=400) as page:
        await page.wait("document.querySelectorAll('.policy').length === 2")
        field = "document.querySelector('.policy [name=quantum_tokens]')"
        await page.evaluate(f"{field}.focus()")
        await page.write("x")
        await page.evaluate("document.querySelector('.policy button').click()")
        await page.wait("document.querySelector('#confirm').open")
        changes = await page.evaluate(
            "[...document.querySelectorAll('#confirm-changes li')].map((e) => e.textContent)"
        )
        assert changes == ["quantum_tokens: 250 → x"]
        await page.evaluate("document.querySelector('#confirm-do').click()")
        await page.wait(f"{field}.getAttribute('aria-invalid') === 'true'")
        assert await page.evaluate(f"document.activeElement === {field}")
        described = f"document.getElementById({field}.getAttribute('aria-describedby')).textContent"
        assert await page.evaluate(described) == refused
        assert await page.evaluate(f"{field}.value") == "x"
    (request,) = (r for r in script.received if isinstance(r, admin.SetPolicyRequest))
    assert (request.name, dict(request.parameters)) == (
        "pascal+earliest_due",
        {"quantum_tokens": "x", "pacer": "false"},
    )


async def test_a_shadow_is_set_and_ended() -> None:
    script = small_fleet()
    async with opened(script, "#/policies") as page:
        for name, button in (
            ("round_robin", ".policy:nth-child(2) button:nth-of-type(2)"),
            ("", "#shadow button"),
        ):
            await page.wait(f"document.querySelector('{button}')")
            await page.evaluate(f"document.querySelector('{button}').click()")
            await page.wait("document.querySelector('#confirm').open")
            script.shadow = admin.Shadow(name=name, policy="least_loaded")
            await page.evaluate("document.querySelector('#confirm-do').click()")
            await page.wait(f"{_SAID}.includes('the shadow is {name or 'none'}')")
    assert [r.name for r in script.received if isinstance(r, admin.SetShadowRequest)] == ["round_robin", ""]


async def test_slos_are_set_with_the_keyboard_and_an_error_is_at_its_field() -> None:
    script = small_fleet()
    async with opened(script, "#/settings", refused=400) as page:
        await page.wait("document.querySelector('#slo [name=ttft]').value === '2s'")
        assert await page.evaluate("document.querySelector('#slo [name=tpot]').value") == "150ms"
        await page.evaluate("document.querySelector('#slo [name=ttft]').focus()")
        await page.write("1500ms")
        await page.key("Tab", 9)
        await page.write("soon")
        await page.key("Enter", 13)
        await page.wait("document.querySelector('#confirm').open")
        changes = await page.evaluate(_CHANGES)
        assert changes == "ttft: 2s → 1500mstpot: 150ms → soon"
        await page.key("Tab", 9)
        await page.key("Enter", 13)
        await page.wait("document.querySelector('#slo-error').textContent.includes(\"parameter 'tpot'\")")
        assert await page.evaluate("document.activeElement.name") == "tpot"
        assert await page.evaluate("document.activeElement.getAttribute('aria-invalid')") == "true"
        # It is mended, and the SLOs are set.
        await page.write("")
        await page.key("Enter", 13)
        await page.wait("document.querySelector('#confirm').open")
        await page.key("Tab", 9)
        await page.key("Enter", 13)
        await page.wait("document.querySelector('#said').textContent.includes('SLOs: ttft=1.5s')")
        await page.wait("document.querySelector('#slo [name=ttft]').value === '2s'")
        assert await page.evaluate("document.querySelector('#slo-error').textContent") == ""
    (request,) = (r for r in script.received if isinstance(r, admin.SetSloRequest))
    assert (request.slo.ttft_s, request.slo.tpot_s, request.slo.HasField("qoe")) == (1.5, 0.0, False)


async def test_stages_are_edited_and_an_error_is_at_its_field() -> None:
    script = small_fleet()
    refused = "stages[1].lo: 100 lies in the stage before, which ends at 8192"
    script.errors["SetStages"] = (grpc.StatusCode.INVALID_ARGUMENT, refused)
    async with opened(script, "#/settings", refused=400) as page:
        await page.wait("document.querySelectorAll('#stages fieldset').length === 1")
        await page.evaluate("document.querySelector('#add-stage').click()")
        await page.wait("document.activeElement.name === 'stages[1].lo'")
        for text in ("100", "9000", "worker-0, worker-1"):
            await page.write(text)
            await page.key("Tab", 9)
        await page.evaluate("document.querySelector('#stages [type=submit]').click()")
        await page.wait("document.querySelector('#confirm').open")
        changes = await page.evaluate(_CHANGES)
        before = "[0, 8192): worker-0, worker-1"
        assert changes == f"before: {before}after: {before}after: [100, 9000): worker-0, worker-1"
        await page.evaluate("document.querySelector('#confirm-do').click()")
        await page.wait("document.querySelector('#stages-error').textContent.includes('lies in')")
        assert await page.evaluate("document.activeElement.name") == "stages[1].lo"
        await page.write("8192")
        script.errors.clear()
        # A snapshot does not replace what is being edited.
        await page.evaluate("document.querySelector('#stages [type=submit]').click()")
        await page.wait("document.querySelector('#confirm').open")
        await page.evaluate("document.querySelector('#confirm-do').click()")
        await page.wait("document.querySelector('#said').textContent.includes('stages: 2')")
        # What holds is shown again, and removing the last stage is a change.
        await page.wait("document.querySelectorAll('#stages fieldset').length === 1")
        await page.evaluate("document.querySelector('#stages fieldset button').click()")
        await page.wait("document.activeElement.id === 'add-stage'")
        await page.evaluate("document.querySelector('#stages [type=reset]').click()")
        await page.wait("document.querySelectorAll('#stages fieldset').length === 1")
    sent = [
        [(stage.lo, stage.hi, list(stage.instance_ids)) for stage in request.stages]
        for request in script.received
        if isinstance(request, admin.SetStagesRequest)
    ]
    both = ["worker-0", "worker-1"]
    assert sent == [[(0, 8192, both), (100, 9000, both)], [(0, 8192, both), (8192, 9000, both)]]


async def test_a_pool_is_set_beside_the_lane() -> None:
    script = small_fleet()
    async with opened(script, "#/fleet/worker-0") as page:
        await page.wait("document.querySelector('#instance select')?.value === 'prefill'")
        await page.evaluate("document.querySelector('#instance select').value = 'decode'")
        await page.evaluate("document.querySelector('#instance form button').focus()")
        await page.key("Enter", 13)
        await page.wait("document.querySelector('#confirm').open")
        assert await page.evaluate(_CHANGES) == "pool: prefill → decode"
        await page.key("Tab", 9)
        await page.key("Enter", 13)
        await page.wait("document.querySelector('#said').textContent.includes('pool of worker-0: decode')")
    (request,) = (r for r in script.received if isinstance(r, admin.SetPoolRequest))
    assert (request.instance_id, request.pool) == ("worker-0", types_pb2.POOL_DECODE)


async def test_another_cluster_is_chosen_and_acted_on() -> None:
    script, coder = small_fleet(), small_fleet()
    del coder.instances[1:]
    coder.instances[0].instance_id = "coder-worker"
    with serving(coder) as elsewhere:
        script.clusters = [
            admin.ClusterInfo(name="c", models=["chat"], admin_addresses=["127.0.0.1:1"]),
            admin.ClusterInfo(name="c.coder", models=["coder"], admin_addresses=[elsewhere]),
        ]
        async with opened(script, refused=404) as page:
            await page.wait("document.querySelector('#cluster').options.length === 2")
            options = await page.evaluate(
                "[...document.querySelector('#cluster').options].map((o) => o.text)"
            )
            assert options == ["c (chat)", "c.coder (coder)"]
            await page.evaluate("document.querySelector('#cluster').focus()")
            await page.key("ArrowDown", 40)
            await page.wait("location.hash === '#/in/c.coder/fleet'")
            await page.wait(f"{_LANES}.startsWith('1 instances')")
            await page.evaluate("location.hash = '#/in/c.coder/fleet/coder-worker'")
            await page.wait("document.querySelector('#instance button')")
            await page.evaluate("document.querySelector('#instance button').click()")
            await page.wait("document.querySelector('#confirm').open")
            where = await page.evaluate("document.querySelector('#confirm-where').textContent")
            assert where == "In c.coder, as local."
            await page.evaluate("document.querySelector('#confirm-do').click()")
            await page.wait("document.querySelector('#said').textContent.includes('coder-worker drains')")
            # Links stay in it, and the way back leads out of it.
            assert await page.evaluate("document.querySelector('nav a').hash") == "#/in/c.coder/fleet"
            await page.evaluate("location.hash = '#/fleet'")
            await page.wait(f"{_LANES}.startsWith('2 instances')")
            # One that does not exist leads to the own one.
            await page.evaluate("location.hash = '#/in/c.none/fleet'")
            await page.wait("document.querySelector('#said').textContent.includes('there is no')")
            await page.wait("location.hash === '#/fleet'")
            await page.wait("document.querySelector('#link').textContent.includes(' as ')")
    drained = [r.instance_id for r in coder.received if isinstance(r, admin.DrainRequest)]
    assert drained == ["coder-worker"]
    assert not any(isinstance(r, admin.DrainRequest) for r in script.received)


async def test_models_that_share_a_cluster_are_groups_of_lanes() -> None:
    script = MovingFleet(6, 30).script
    for number, instance in enumerate(script.instances):
        instance.model = "coder" if number % 3 else "chat"
    async with opened(script) as page:
        label = await page.evaluate(_LANES)
        assert label.startswith("6 instances of 2 models (chat: 2, coder: 4) as lanes;")
        await page.evaluate("document.querySelector('#show-table').click()")
        rows = "[...document.querySelectorAll('#instances tbody tr')].map((row) => row.cells[0].textContent)"
        await page.wait(f"{rows}.length === 6")
        names = [f"worker-{number}" for number in (0, 3, 1, 2, 4, 5)]
        assert await page.evaluate(rows) == names


async def test_nothing_is_done_without_a_confirmation() -> None:
    script = small_fleet()
    async with opened(script, "#/fleet/worker-0") as page:
        await page.wait("document.querySelector('#instance button')")
        await page.evaluate("document.querySelector('#instance button').click()")
        await page.wait("document.querySelector('#confirm').open")
        await page.key("Escape", 27)
        await page.wait("!document.querySelector('#confirm').open")
    assert not any(isinstance(request, admin.DrainRequest) for request in script.received)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_contrast_and_names_in_both_themes(scheme: str) -> None:
    script = small_fleet()
    async with opened(script) as page:
        await page.scheme(scheme)
        views = ("fleet/worker-0", "requests", "moves", "policies", "settings", "alerts")
        for view in (*views, "request/chatcmpl-aaa1"):
            await page.evaluate(f"location.hash = '#/{view}'")
            await page.wait("document.querySelector('main').innerText.trim()")
            assert await page.evaluate(_CONTRAST) == [], view
        assert await page.evaluate(_UNNAMED) == []
        heads = await page.evaluate("[...document.querySelectorAll('th')].every((th) => th.scope === 'col')")
        assert heads


async def test_a_hidden_page_does_not_poll() -> None:
    script = small_fleet()
    async with opened(script) as page:
        await page.evaluate(
            "(() => { Object.defineProperty(document, 'hidden', { get: () => true, configurable: true });"
            "document.dispatchEvent(new Event('visibilitychange')); })()"
        )
        await page.wait("document.querySelector('#link').textContent === 'paused'")
        quiet = 0
        async with asyncio.timeout(WAIT_S):
            while quiet < 3:
                # A poll that was under way ends first.
                before = len(script.received)
                await asyncio.sleep(1.5)
                quiet = quiet + 1 if len(script.received) == before else 0
        await page.evaluate(
            "(() => { delete document.hidden; document.dispatchEvent(new Event('visibilitychange')); })()"
        )
        await page.wait("document.querySelector('#link').textContent.includes(' as local')")
