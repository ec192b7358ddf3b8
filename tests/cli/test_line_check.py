"""Whether vLLM is loaded to check a line."""

from __future__ import annotations

import pytest

from tailrace.cli.line_check import needs_vllm
from tailrace.local.options import ClusterOptions, Engine
from tailrace.service.vllm_line import VllmLine

CHAT = ["--served-model-name", "chat"]


@pytest.mark.parametrize(
    ("line", "needs"),
    [
        ([], False),
        (CHAT, False),
        ([*CHAT, "other", "--api-key", "a", "b", *CHAT], False),
        (["--seed", "1"], True),
        ([*CHAT, "--seed", "1"], True),
        (["--served-model-name=chat"], True),
        (["--served_model_name", "chat"], True),
        (["--served-model-name"], True),
        (["--served-model-name", "--api-key", "a"], True),
        (["--served-model-name", "-1"], True),
        ([*CHAT, "--"], True),
        ([*CHAT, "--api-key"], True),
        ([*CHAT, ""], True),
    ],
)
def test_a_line_that_cannot_be_refused_is_not_read(
    monkeypatch: pytest.MonkeyPatch, line: list[str], needs: bool
) -> None:
    monkeypatch.setattr("tailrace.cli.line_check.vllm_version", lambda: "1")
    options = ClusterOptions(engine=Engine.SIMULATED, line=VllmLine.read(line))
    assert needs_vllm(options) is needs


def test_a_worker_with_vllm_loads_it_for_any_line(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ClusterOptions(engine=Engine.VLLM, line=VllmLine.read(CHAT))
    for version in ("1", ""):
        monkeypatch.setattr("tailrace.cli.line_check.vllm_version", lambda version=version: version)
        assert needs_vllm(options) is bool(version)
