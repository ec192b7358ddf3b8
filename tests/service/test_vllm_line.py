"""What is read of a `vllm serve` line without vLLM, and which words are a command's own options."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.service.vllm_line import VllmLine, VllmLineError, split_options

_FLAGS = st.sampled_from(["--dtype", "-tp", "--max_model_len", "--lora-modules", "--enforce-eager"])
_VALUES = st.lists(
    st.sampled_from(["half", "2", "-1", "a=b", '{"x": 1}', "--x y".partition(" ")[2]]), max_size=3
)
_WORDS = st.lists(st.tuples(_FLAGS, _VALUES), max_size=6)


def test_the_model_comes_first_and_values_follow_their_flags() -> None:
    words = ["a/model", "-tp", "2", "--max_model_len=32k", "--lora-modules", "x=1", "y=2", "--enforce-eager"]
    line = VllmLine.read(words)
    assert line.model == "a/model"
    assert list(line.arguments) == words[1:]
    assert line.count("tensor_parallel_size", 1) == 2
    assert line.last("max_model_len") == "32k"
    assert line.flags["lora_modules"] == ("x=1", "y=2")
    assert line.flags["enforce_eager"] == ()
    assert line.last("enforce_eager") == line.last("dtype") == ""


def test_negative_numbers_are_values_and_the_last_of_a_repeated_flag_counts() -> None:
    line = VllmLine.read(["--max-logprobs", "-1", "--seed", "1", "--seed", "2"])
    assert line.last("max_logprobs") == "-1" and line.last("seed") == "2"


def test_a_config_file_is_read_and_the_line_takes_precedence(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: a/model\ntensor-parallel-size: 4\nserved-model-name: [x, y]\nenforce-eager: true\n"
    )
    line = VllmLine.read([f"--config={file}", "-tp", "2"])
    assert line.arguments == ("--config", str(file), "-tp", "2")
    assert line.has("tensor_parallel_size", "seed") and not line.has("served_model_name")
    assert line.model == "a/model"
    assert line.count("tensor_parallel_size", 1) == 2
    assert line.flags["served_model_name"] == ("x", "y")
    assert line.flags["enforce_eager"] == ()
    file.write_text("no: [mapping")
    with pytest.raises(VllmLineError, match=r"--config .*serve\.yaml: "):
        VllmLine.read(["--config", str(file)])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["a", "b"], "'b' is not a flag of vllm serve"),
        (["a", "--headless"], "--headless: workers serve no HTTP"),
        (["--config"], "--config : "),
        (["--config", "/dev/zero"], "--config /dev/zero: "),
    ],
)
def test_an_unusable_line_is_refused(words: list[str], problem: str) -> None:
    with pytest.raises(VllmLineError) as error:
        VllmLine.read(words)
    assert problem in str(error.value)


@pytest.mark.parametrize("text", ["two", "0.5", "-1", ""])
def test_a_size_is_a_number(text: str) -> None:
    with pytest.raises(VllmLineError, match="--tensor-parallel-size"):
        VllmLine.read([f"-tp={text}"]).count("tensor_parallel_size", 1)


@given(_WORDS)
def test_a_line_without_a_flag_keeps_all_others(flags: list[tuple[str, list[str]]]) -> None:
    words = [word for flag, values in flags for word in (flag, *values)]
    line = VllmLine.read(["a/model", *words])
    for name in ("tensor_parallel_size", "dtype"):
        rest = line.without(name)
        assert name not in rest.flags
        assert rest == VllmLine.read(["a/model", *rest.arguments])
        assert {**rest.flags, name: ()}.keys() == {*line.flags, name}


@click.command()
@click.option("--kv-blocks", type=int)
@click.option("--tls/--no-tls")
@click.option("--pair", nargs=2)
def _one(**_: object) -> None:
    """Do nothing."""


@click.command()
@click.option("--kv-blocks", type=int)
@click.option("--verbose", "-v", count=True)
def _other(**_: object) -> None:
    """Do nothing."""


def test_options_go_to_each_command_that_has_them() -> None:
    words = [
        "a/model",
        "--kv_blocks",
        "9",
        "-dph",
        "--no-tls",
        "--",
        "--pair",
        "x",
        "y",
        "-v",
        "--dtype",
        "half",
    ]
    (one, other), rest = split_options(words, [click.Context(_one), click.Context(_other)])
    assert one == ["--kv-blocks", "9", "--no-tls", "--pair", "x", "y"]
    assert other == ["--kv-blocks", "9", "-v"]
    # -dph is vLLM's, and no -h.
    assert rest == ["a/model", "-dph", "--dtype", "half"]


def test_a_value_after_an_equals_sign_stays_with_its_option() -> None:
    (one,), rest = split_options(["--kv-blocks=9", "--dtype=half", "x"], [click.Context(_one)])
    assert one == ["--kv-blocks=9"] and rest == ["--dtype=half", "x"]
