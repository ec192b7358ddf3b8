"""Tables on terminals that are narrower than they are."""

from __future__ import annotations

import io
from collections import deque

import pytest
from rich.console import Console, RenderableType

from tailrace.cli import output
from tailrace.cli.output import fit, print_figures
from tailrace.cli.tables import POLICIES, REQUESTS, SHRINKING
from tailrace.cli.top import Sample, frame
from tailrace.v1.admin_pb2 import InstanceInfo, PolicyInfo, RecentFigures, RequestInfo
from tailrace.v1.types_pb2 import PHASE_ANSWERING, InstanceState

REQUEST = RequestInfo(
    request_id="chatcmpl-0123456789abcdef-01234567",
    instance_id="worker-0",
    phase=PHASE_ANSWERING,
    prompt_tokens=1_234,
    age_s=12.5,
)


def live(renderable: RenderableType, width: int) -> list[str]:
    """Return the lines of a live view on a terminal of this width."""
    terminal = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    lines = terminal.render_lines(renderable, pad=False)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


@pytest.fixture(params=[40, 80])
def narrow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the width of the terminal to which commands print."""
    width: int = request.param
    monkeypatch.setattr(output, "console", lambda: Console(force_terminal=True, width=width))
    return width


@pytest.mark.usefixtures("narrow")
def test_nothing_of_a_printed_table_is_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    print_figures(REQUESTS.table([REQUEST]))
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split()[0] == "REQUEST" and heading.split()[-1] == "AGE"
    assert row.split()[:3] == [REQUEST.request_id, "worker-0", "answering"]
    assert row.endswith("12.5 s")
    print_figures(POLICIES.table([PolicyInfo(name="mine", summary="what it does " * 10)]))
    assert "…" not in capsys.readouterr().out


def test_a_live_table_shortens_ids_and_cuts_off_columns_on_the_right() -> None:
    heading, row = live(fit(REQUESTS.table([REQUEST]), 80, SHRINKING), 80)
    assert row.split()[:3] == ["chatcmpl-012345…", "worker-0", "answering"]
    assert heading.split()[:3] == ["REQUEST", "INSTANCE", "PHASE"] and "AGE" not in heading
    assert len(row) <= 80


def test_top_keeps_names_and_figures() -> None:
    instances = tuple(InstanceInfo(instance_id=f"worker-{i}", running=1_234) for i in range(2))
    lines = live(frame_of(instances), 80)
    assert any("worker-1" in line and " 1234 " in line for line in lines)
    assert any("worker-0" in line and "answering" in line and line.endswith("12.5 s") for line in lines)


def test_top_has_slo_and_moves_at_80_columns() -> None:
    recent = RecentFigures(
        answers=9,
        ttft_ms_p50=812.0,
        ttft_ms_p99=2412.0,
        tpot_ms_p50=21.4,
        tpot_ms_p99=33.1,
        slo_attainment=0.5,
    )
    instance = InstanceInfo(instance_id="worker-0", running=12, kv_blocks_total=100, recent=recent)
    instance.state = InstanceState.INSTANCE_STATE_ACTIVE
    rows = [line for line in live(frame_of((instance,)), 80) if line.startswith("worker-0")]
    assert {"812/2412", "21.4/33.1", "50%", "0/0"} <= set(rows[0].split()) and len(rows[0]) <= 80


def frame_of(instances: tuple[InstanceInfo, ...]) -> RenderableType:
    """Return the view of `tailrace top` with these instances and one request."""
    return frame(deque([Sample(1.0, "pascal", instances, (REQUEST,), 1, (), RecentFigures())]), 80)
