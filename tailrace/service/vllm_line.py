"""The model and the flags of a `vllm serve` line, beside the options that a command of ours has itself.

Flags are passed on as they are given: vLLM's own parser reads them where vLLM is loaded
(wire/serve_flags.py). What is read here are the few that a process needs which does not load it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Final, NoReturn

import click

from tailrace.bounded import read_regular
from tailrace.brief_help import BriefCommand, show_all
from tailrace.yaml_errors import yaml_problem

Flags = Mapping[str, tuple[str, ...]]

_SHORT: Final = {
    "-asc": "--api-server-count",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-n": "--nnodes",
    "-pp": "--pipeline-parallel-size",
    "-r": "--node-rank",
    "-tp": "--tensor-parallel-size",
}
_CONFIG: Final = "--config"
# A fleet has another way to do what these do.
_WITHOUT_MEANING: Final = {
    "api_server_count": "several API servers are several front ends (tailrace up --frontends N)",
    "grpc": "clients come over HTTP",
    "grpc_port": "clients come over HTTP",
    "headless": "workers serve no HTTP as it is (tailrace serve worker)",
    "uds": "clients come over HTTP on a port (--port)",
}


class VllmLineError(ValueError):
    """A line of `vllm serve` that cannot be used; the message names the flag."""


@dataclass(frozen=True, slots=True)
class VllmLine:
    """What follows `vllm serve`. `model` is empty if the line has none."""

    model: str = ""
    # As given, without the model.
    arguments: tuple[str, ...] = ()
    # Their values by name (`max_model_len`), those of a --config file included; of a repeated flag the last.
    flags: Flags = field(default_factory=dict)

    @classmethod
    def read(cls, arguments: Sequence[str]) -> VllmLine:
        """Read a line whose model, if any, comes first or in a --config file. Raise VllmLineError."""
        model, words = "", [word for argument in arguments for word in _words(argument)]
        if words and not words[0].startswith("-"):
            model, *words = words
        flags = dict(read_flags(words))
        if "config" in flags:
            flags = dict(read_flags(_config_arguments(flags["config"]))) | flags
        for name in flags.keys() & _WITHOUT_MEANING.keys():
            raise VllmLineError(f"--{name.replace('_', '-')}: {_WITHOUT_MEANING[name]}")
        line = cls(model, tuple(words), flags)
        return replace(line, model=model or line.last("model") or line.last("model_tag"))

    def without(self, *names: str) -> VllmLine:
        """Return the line without these flags; a --config file keeps them."""
        kept: list[str] = []
        dropping = False
        for argument in self.arguments:
            if _is_flag(argument):
                dropping = _name(argument) in names
            if not dropping:
                kept.append(argument)
        return VllmLine(self.model, tuple(kept), {k: v for k, v in self.flags.items() if k not in names})

    def adding(self, *arguments: str) -> VllmLine:
        """Return the line with more arguments."""
        return VllmLine.read([*([self.model] if self.model else []), *self.arguments, *arguments])

    def has(self, *names: str) -> bool:
        """Return whether one of these flags is on the line itself, and not in a --config file alone."""
        return any(_name(argument) in names for argument in self.arguments if _is_flag(argument))

    def last(self, name: str) -> str:
        """Return the last value of a flag; empty if it is not given or has none."""
        return (self.flags.get(name) or ("",))[-1]

    def count(self, name: str, default: int) -> int:
        """Return the value of a flag that takes a number. Raise VllmLineError."""
        text = self.last(name)
        if not text and name not in self.flags:
            return default
        if not (text.isascii() and text.isdecimal() and int(text)):
            raise VllmLineError(f"--{name.replace('_', '-')}: {text!r} is not a number above 0")
        return int(text)


NO_LINE: Final = VllmLine()
"""A line without anything."""


def read_flags(arguments: Sequence[str]) -> Flags:
    """Return the values of flags by name, with underscores: all words up to the next flag.

    Raise VllmLineError for a word that is no flag and follows none.
    """
    flags: dict[str, tuple[str, ...]] = {}
    name = ""
    for argument in arguments:
        _, equals, value = argument.partition("=")
        if _is_flag(argument):
            name = _name(argument)
            flags[name] = (value,) if equals else ()
        elif not name:
            raise VllmLineError(f"{argument!r} is not a flag of vllm serve (--NAME VALUE or --NAME=VALUE)")
        else:
            flags[name] = (*flags[name], argument)
    return flags


def _words(argument: str) -> list[str]:
    """Return the words of an argument: vLLM reads --config FILE, and takes --config=FILE for another flag."""
    flag, equals, value = argument.partition("=")
    return [flag, value] if equals and flag == _CONFIG else [argument]


def _name(flag: str) -> str:
    """Return the name of a flag, with underscores."""
    flag = flag.partition("=")[0]
    return _SHORT.get(flag, flag).lstrip("-").replace("-", "_")


def _is_flag(argument: str) -> bool:
    """Return whether this is a flag and no value, which a negative number is."""
    return argument[:1] == "-" and not argument[1:2].isdigit() and argument not in ("-", "--")


def _config_arguments(values: Sequence[str]) -> list[str]:
    """Return what vLLM makes of a --config file. Raise VllmLineError."""
    path = values[0] if len(values) == 1 else ""
    try:
        # A dependency of vLLM, and of nothing that runs without it.
        import yaml
    except ImportError as error:
        raise VllmLineError(
            f"{_CONFIG} {path}: {error}; scripts/install.sh installs what is missing"
        ) from error
    try:
        content: object = yaml.safe_load(read_regular(Path(path)))
    except yaml.YAMLError as error:
        raise VllmLineError(f"{_CONFIG} {path}: {yaml_problem(error)}") from error
    except (OSError, ValueError) as error:
        raise VllmLineError(f"{_CONFIG} {path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise VllmLineError(f"{_CONFIG} {path}: flags of vllm serve by name expected")
    return flag_arguments(content)


def flag_arguments(flags: Mapping[str, object]) -> list[str]:
    """Return flags by name, as a --config file has them, as a line has them: true has no
    value, false is left out, a list is several words, an object its JSON."""
    arguments: list[str] = []
    for name, value in flags.items():
        if value is not False:
            arguments.append(f"--{name}")
        if isinstance(value, list):
            arguments += [str(each) for each in value]
        elif not isinstance(value, bool):
            arguments.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return arguments


def split_options(
    arguments: Sequence[str], contexts: Sequence[click.Context]
) -> tuple[list[list[str]], list[str]]:
    """Return for the command of each context those arguments that are its options, and the rest.

    An option that several commands have goes to all of them. The word `--` is left out.
    """
    options = [_options(context) for context in contexts]
    own: list[list[str]] = [[] for _ in contexts]
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        takers = [number for number, known in enumerate(options) if name in known]
        if takers:
            option = options[takers[0]][name]
            values = 0 if equals or option.is_flag or option.count else option.nargs
            taken = [name + equals + value, *islice(words, values)]
            for number in takers:
                own[number] += taken
        elif word != "--":
            rest.append(word)
    return own, rest


def _options(context: click.Context) -> dict[str, click.Option]:
    """Return the options of a context's command by name, that for help included."""
    options = [each for each in context.command.get_params(context) if isinstance(each, click.Option)]
    return {name: option for option in options for name in (*option.opts, *option.secondary_opts)}


GIVEN: Final = "tailrace: the command line"
"""Name in a context's `meta` of the words that a VllmCommand got."""


class VllmCommand(BriefCommand):
    """A command that also takes a `vllm serve` line, which its function gets as `arguments`, unread."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options and leave the rest; --help=NAME shows vLLM's help, too."""
        for arg in args:
            if arg.startswith("--help="):
                _show_help(ctx, arg)
        # Those of services, whose options are read as well, share `meta`.
        ctx.meta.setdefault(GIVEN, [*args])
        (own,), ctx.params["arguments"] = split_options(args, [ctx])
        return super().parse_args(ctx, own)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Name what the usage line has."""
        return [*super().collect_usage_pieces(ctx), "[MODEL]", "[FLAG OF VLLM SERVE]..."]


def _show_help(ctx: click.Context, option: str) -> NoReturn:
    """Show what `vllm serve` says to --help=NAME, after our own help if that is for all."""
    if option == "--help=all":
        show_all(ctx)
        click.echo(f"{ctx.get_help()}\n\nFlags of vllm serve:\n")
    if find_spec("vllm") is None:
        raise click.ClickException("vLLM is not installed here; make install installs it")
    click.echo("loading vLLM, which takes some seconds ...", err=True)
    # As a process of its own: importing vLLM takes seconds, and sets up much else.
    vllm = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", option]
    ctx.exit(subprocess.run(vllm, env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}).returncode)


def read_line(arguments: Sequence[str], model: str | None = None) -> VllmLine:
    """Return the line that a command got beside its options, and its --model. Raise click.UsageError."""
    try:
        line = VllmLine.read(arguments)
    except VllmLineError as error:
        raise click.UsageError(str(error)) from error
    if model and line.model and model != line.model:
        raise click.UsageError(f"two models are given: {line.model} and --model {model}")
    # Units and containers give these always, and leave them empty where there is nothing to say.
    empty = [name for name in ("served_model_name", "reasoning_parser") if not line.last(name)]
    return line.without(*empty)
