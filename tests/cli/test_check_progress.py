"""`tailrace up` says that it loads vLLM before it does: that takes up to a minute on a busy machine."""

from __future__ import annotations

import pytest

from tailrace.cli import up
from tailrace.cli.errors import UsageProblem
from tailrace.local.options import ClusterOptions, Engine
from tailrace.service.vllm_line import VllmLine
from tailrace.tiny import MODEL_PATH


@pytest.mark.parametrize(
    ("engine", "line", "frontend", "installed", "told"),
    [
        (Engine.SIMULATED, ["--max-model-lenn", "100"], (), "1", True),
        (Engine.SIMULATED, [], ("--api-keys", "k"), "1", False),
        (Engine.VLLM, [], ("--api-keys", "k"), "1", True),
        (Engine.VLLM, [], ("--api-keys", "k"), "", False),
    ],
)
def test_loading_vllm_is_told_first(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    engine: Engine,
    line: list[str],
    frontend: tuple[str, ...],
    installed: str,
    told: bool,
) -> None:
    def refusal(options: ClusterOptions) -> str:
        assert ("checking the flags, for which vLLM is loaded" in capsys.readouterr().err) is told
        return "refused"

    monkeypatch.setattr("tailrace.cli.line_check.vllm_version", lambda: installed)
    monkeypatch.setattr(up, "refusal", refusal)
    model = str(MODEL_PATH)
    options = ClusterOptions(
        model=model, engine=engine, line=VllmLine.read(line), frontend_arguments=frontend
    )
    with pytest.raises(UsageProblem, match="refused"):
        up.require_startable("up", options, "")
