"""Users are warned before vLLM serves float32 weights in 16 bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tailrace.local.requirements import loses_precision
from tailrace.service.vllm_line import NO_LINE, VllmLine
from tailrace.tiny import MODEL_PATH


@pytest.mark.parametrize(
    ("config", "arguments", "loses"),
    [
        ({"torch_dtype": "float32"}, (), True),
        ({"dtype": "float32"}, ("--max-num-seqs", "64"), True),
        ({"dtype": "float32"}, ("--dtype", "float32"), False),
        ({"dtype": "bfloat16"}, (), False),
        ([], (), False),
    ],
)
def test_precision_loss_follows_from_the_configuration(
    tmp_path: Path, config: object, arguments: tuple[str, ...], loses: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert loses_precision(str(tmp_path), VllmLine.read(arguments)) is loses


def test_the_shipped_model_and_hub_models_cause_no_warning() -> None:
    assert not loses_precision(str(MODEL_PATH), NO_LINE)
    assert not loses_precision("org/model", NO_LINE)
