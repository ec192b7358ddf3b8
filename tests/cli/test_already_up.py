"""`tailrace up` beside a running cluster: whether that is what is asked for."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from tailrace.cli.errors import CliError
from tailrace.cli.up import _require_same, up
from tailrace.local.state import RunState

_MADE = ["--engine", "vllm", "--front", "auto", "--port", "8000"]


@pytest.mark.parametrize(
    ("given", "started", "same"),
    [
        (["--port", "8000"], _MADE, True),
        (["--port=8000"], [], True),
        (["--port", "8001"], _MADE, False),
        ([], ["--port", "8001"], True),
        (["org/m", "--seed=1", "--workers", "2"], ["--workers=2", "org/m", "--seed", "1"], True),
        (["org/m", "--seed", "1"], ["org/m"], False),
        (["--seed", "1", "--block-size", "2"], ["--seed", "2", "--block-size", "1"], False),
        (["org/m", "-tp", "2"], ["--model", "org/m", "--tensor_parallel_size", "2"], True),
        (
            ["--max-num-seqs", "1", "--max-num-seqs", "2"],
            ["--max-num-seqs", "2", "--max-num-seqs", "1"],
            False,
        ),
        (["--set", "a=1", "--set", "b=2"], ["--set", "b=2", "--set", "a=1"], True),
        (["--port", "8000"], ["--an-option-of-old", "x"], False),
        (["--port", "8000"], ["--workers", "many"], False),
    ],
)
def test_flags_are_other_ones_if_their_values_are(given: list[str], started: list[str], same: bool) -> None:
    context = up.make_context("up", given)
    with nullcontext() if same else pytest.raises(CliError, match="already up, with other flags"):
        _require_same(RunState(given=started), context)
