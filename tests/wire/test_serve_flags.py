"""vLLM's own parser reads the flags of `vllm serve` in each process."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from tailrace.cli.main import main
from tailrace.cli.serve import service_command
from tailrace.cli.up import up
from tailrace.service.vllm_line import VllmLine, VllmLineError
from tailrace.tiny import MODEL_PATH
from tests.harness.forked import api_server_python
from worker_agent.settings import EngineOptionError, EngineOptions, with_flags

pytestmark = pytest.mark.vllm

_PAGE = Path(__file__).parents[2] / "docs" / "vllm-flags.md"
_LINES = re.findall(r"^\| `(\S+/.+)` \| (.+) \|$", _PAGE.read_text(), re.MULTILINE)


def engine_arguments(*words: str) -> dict[str, object]:
    """Return what a worker's engine gets."""
    return dict(with_flags(EngineOptions("vllm"), VllmLine.read(words)).arguments)


def test_values_are_as_vllm_reads_them() -> None:
    arguments = engine_arguments(
        "a/model",
        "--max-model-len",
        "32k",
        "-tp",
        "2",
        "--enforce_eager",
        "--no-enable-prefix-caching",
        "-O0",
    )
    assert arguments == {
        "max_model_len": 32_000,
        "tensor_parallel_size": 2,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "optimization_level": arguments["optimization_level"],
    }


def test_objects_stay_json_for_other_machines_and_our_checks() -> None:
    arguments = engine_arguments(
        *("--kv-transfer-config", '{"kv_connector": "X", "kv_role": "kv_both"}'),
        *("--compilation-config", '{"mode": 3}', "--hf-overrides.a.b", "1"),
        *("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'),
    )
    assert arguments["kv_transfer_config"] == {"kv_connector": "X", "kv_role": "kv_both"}
    assert arguments["compilation_config"] == {"mode": 3}
    assert json.loads(json.dumps(arguments)) == arguments


def test_flags_of_the_api_server_are_told_to_be_of_no_effect() -> None:
    options = with_flags(
        EngineOptions("vllm"), VllmLine.read(["--port", "8080", "--enable-auto-tool-choice", "--seed", "1"])
    )
    assert options.unused == ("--enable-auto-tool-choice", "--port")
    assert options.arguments == {"seed": 1}


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name"])
@pytest.mark.parametrize(
    "values", [["a"], ["a", "b c"], ["{}", "a=b", "1.5", "@a", "é", "+"], ["a" * 10_000]]
)
def test_flags_that_take_any_words(flag: str, values: list[str]) -> None:
    """So says `tailrace.cli.line_check`."""
    from tailrace.wire.serve_flags import read_engine_flags, read_serve_arguments, serve_parser

    line = [flag, "x", flag, *values]
    read_engine_flags(line)
    arguments = read_serve_arguments(serve_parser(), ["a/model", *line])
    assert vars(arguments)[flag.removeprefix("--").replace("-", "_")] == values


def test_a_config_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-model-len: 4096\nseed: 1\n")
    assert engine_arguments("a/model", "--config", str(file), "--seed", "2") == {
        "max_model_len": 4096,
        "seed": 2,
    }


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--dtypo", "x"], "unrecognized arguments: --dtypo x (did you mean '--dtype'?)"),
        (["--max-modl-len=4"], "--max-modl-len=4 (did you mean '--max-model-len'?)"),
        (
            ["--kv-cache-dtype", "fp8_e4m4"],
            "argument --kv-cache-dtype: invalid choice: 'fp8_e4m4' (did you mean",
        ),
        (["--dtype", "float99"], "argument --dtype: invalid choice: 'float99'"),
        (
            ["--max-model-len", "many"],
            "argument --max-model-len: invalid human_readable_int_or_auto value: 'many'",
        ),
        (["--kv-transfer-config", '{"kv_connector": "X"}'], "Please specify kv_role"),
    ],
)
def test_a_refused_flag_is_named_in_one_line(words: list[str], problem: str) -> None:
    with pytest.raises(EngineOptionError) as error:
        engine_arguments(*words)
    assert problem in str(error.value)
    assert "\n" not in str(error.value) and "pydantic" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--tool-call-parser", "hermes2"], "--tool-call-parser: invalid choice: 'hermes2' (did you mean"),
        (["--reasoning-parser", "qwen33"], "--reasoning-parser: invalid choice: 'qwen33' (did you mean"),
        (["--reasoning-parser", "@"], "--reasoning-parser: invalid choice: '@' (choose from "),
        (["--chat-template", "/no/such.jinja"], "/no/such.jinja"),
    ],
)
def test_what_the_api_server_would_refuse(words: list[str], problem: str) -> None:
    from tailrace.wire.serve_flags import FlagRefused, read_serve_arguments, serve_parser

    with pytest.raises(FlagRefused) as error:
        read_serve_arguments(serve_parser(), ["a/model", "--enable-auto-tool-choice", *words])
    assert problem in str(error.value)


def test_flags_are_checked_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an option of ours may have been meant."""
    monkeypatch.setenv("TAILRACE_RUN_DIR", str(tmp_path / "run"))
    # Of the process that reads the flags by vLLM's parser.
    monkeypatch.setattr(sys, "executable", api_server_python() or sys.executable)
    result = CliRunner().invoke(main, ["up", "--wrokers", "2"])
    assert result.exit_code == 2
    assert "unrecognized arguments: --wrokers 2 (did you mean '--workers'?)" in result.stderr
    assert not (tmp_path / "run" / "data" / "etcd").exists()


@pytest.mark.slow
def test_doctor_and_config_check_flags_in_the_same_way(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["doctor", str(MODEL_PATH), "--max-model-len", "banana", "-o", "json"])
    found = {each["subject"]: each["detail"] for each in json.loads(result.stdout)["findings"]}
    assert "argument --max-model-len: invalid" in found["flags"] and "'banana'" in found["flags"]
    file = tmp_path / "fleet.yaml"
    file.write_text(f"models: [{{model: {MODEL_PATH}, flags: {{max-modl-len: 4096}}}}]")
    result = CliRunner().invoke(main, ["config", "check", "-f", str(file)])
    assert result.exit_code == 2
    assert "models[0].flags: unrecognized arguments: --max-modl-len 4096 (did you mean" in result.stderr


def test_no_option_of_ours_has_another_meaning_in_vllm() -> None:
    from tailrace.wire.serve_flags import serve_parser

    theirs = {name for action in serve_parser()._actions for name in action.option_strings}
    for command, same in (
        ("worker", {"--model"}),
        ("frontend", {"--model"}),
        ("up", {"--model", "--host", "--port"}),
    ):
        shown = up if command == "up" else service_command(command)
        ours = {name for each in shown.params for name in (*each.opts, *each.secondary_opts)}
        assert ours & theirs == same


def test_forty_lines() -> None:
    """Each line of the table does what the page says, as far as that can be found out without GPUs."""
    from vllm.engine.arg_utils import EngineArgs

    known = {each.name for each in fields(EngineArgs)}
    assert len(_LINES) == 40
    for text, outcome in _LINES:
        words = shlex.split(text)
        problem = ""
        try:
            line = VllmLine.read(words)
            refused = [name for name in line.flags if name in _not_local()]
            problem = f"--{refused[0].replace('_', '-')}: {_not_local()[refused[0]]}" if refused else ""
            options = with_flags(EngineOptions("vllm"), line)
            assert options.model == words[0]
            assert options.arguments.keys() <= known
        except (EngineOptionError, VllmLineError) as error:
            problem = problem or str(error)
        assert ("starts" if not problem else outcome.strip("`")) in (problem or outcome), text
        assert (outcome == "starts") is not bool(problem), (text, problem)


def _not_local() -> dict[str, str]:
    from tailrace.cli.line import NOT_LOCAL

    return NOT_LOCAL
