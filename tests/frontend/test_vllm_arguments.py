"""An argument that vLLM's API server refuses is named in one line, without the usage of all the others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from frontend_svc.api_server.spec import ARGUMENTS_REFUSED
from tailrace.tiny import MODEL_PATH, REASONING_PARSER
from tests.harness.forked import ForkedCommand
from tests.harness.local_etcd import local_etcd
from tests.waiting import WAIT_S

pytestmark = pytest.mark.vllm

_PLUGIN = """
from vllm.tool_parsers import ToolParser, ToolParserManager

@ToolParserManager.register_module("ours")
class Ours(ToolParser):
    pass
"""


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what is said about the arguments, which must be refused."""
    from frontend_svc.api_server.python_app import parse_arguments

    with pytest.raises(SystemExit) as end:
        parse_arguments([str(MODEL_PATH), *arguments])
    assert end.value.code == ARGUMENTS_REFUSED
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("Error", "usage"))]
    assert len(said) == 1
    return said[0]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--dtype=foo"], "Error: argument --dtype: invalid choice: 'foo' (choose from 'auto', "),
        (["--dtype"], "Error: argument --dtype: expected one argument"),
        (["--max-model-len=many"], "Error: argument --max-model-len: invalid "),
        (["--no-such-flag=1"], "Error: unrecognized arguments: --no-such-flag=1"),
        (["--enable-auto-tool-choice"], "Error: --enable-auto-tool-choice requires --tool-call-parser"),
        (
            ["--enable-auto-tool-choice", "--tool-call-parser=none"],
            "Error: argument --tool-call-parser: invalid choice: 'none' (choose from 'apertus', ",
        ),
        (
            ["--enable-auto-tool-choice", "--chat-template=/no/such"],
            "Error: The supplied chat template string",
        ),
        (["--reasoning-parser=none"], "Error: argument --reasoning-parser: invalid choice: 'none' (choose"),
        (
            ['--structured-outputs-config={"reasoning_parser": "none"}'],
            "Error: invalid reasoning parser: none (chose from { ",
        ),
    ],
)
def test_a_refused_argument_is_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert refused(capsys, *arguments).startswith(line)


def test_a_message_of_several_lines_becomes_one(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "--compilation-config={x")
    assert line.startswith("Error: argument --compilation-config/-cc: ")
    assert line.endswith("Invalid JSON: key must be a string at line 1 column 2")


def test_the_parser_of_a_plugin_is_accepted(tmp_path: Path) -> None:
    from frontend_svc.api_server.python_app import parse_arguments

    plugin = tmp_path / "plugin.py"
    plugin.write_text(_PLUGIN)
    tools = ["--enable-auto-tool-choice", "--tool-call-parser=ours", f"--tool-parser-plugin={plugin}"]
    assert parse_arguments([str(MODEL_PATH), *tools]).tool_call_parser == "ours"


def test_reasoning_parser_that_does_not_fit_the_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoTokenizer

    from frontend_svc.api_server.python_app import check_reasoning_parser

    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    check_reasoning_parser(REASONING_PARSER, tokenizer)
    with pytest.raises(SystemExit) as end:
        check_reasoning_parser("mistral", tokenizer)
    assert end.value.code == ARGUMENTS_REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Error: argument --reasoning-parser: 'mistral' does not fit this model: ")


async def test_the_front_end_ends_with_that_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with local_etcd(tmp_path / "etcd") as etcd:
        command = ["serve", "frontend", "--etcd", etcd.endpoint, "--http", "127.0.0.1:0"]
        process = ForkedCommand([*command, "--max-model-len=9999999"], log, {}, vllm=False)
        try:
            # vLLM is imported by two processes in turn.
            code = await asyncio.to_thread(process.wait, 4 * WAIT_S)
        finally:
            process.kill()
    assert code == ARGUMENTS_REFUSED
    # On a busy machine, etcd may be logged only after it.
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("Error: ")]
    assert line.startswith("Error: vLLM's API server rejects these settings: ")
