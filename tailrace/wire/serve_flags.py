"""Read flags of `vllm serve` by vLLM's own parser. Importing this module imports vLLM."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, NoReturn

import click
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.exceptions import VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tailrace.json_value import JsonValue
from tailrace.suggestion import did_you_mean
from tailrace.wire.setting_errors import one_line, without_pydantic

_UNKNOWN: Final = "unrecognized arguments: "
_CHOICE: Final = re.compile(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)")


class FlagRefused(ValueError):
    """vLLM does not accept a flag or its value; the message names the flag."""


class ServeParser(FlexibleArgumentParser):  # type: ignore[misc]
    """vLLM's parser, whose error is an exception and not the usage of a few hundred flags."""

    def error(self, message: str) -> NoReturn:
        """Raise FlagRefused."""
        message = without_pydantic(message)
        if message.startswith(_UNKNOWN):
            known = [*self._option_string_actions, *_options_of_ours()]
            words = message.removeprefix(_UNKNOWN).split()
            flags = [word.partition("=")[0] for word in words if word.startswith("-")]
            message += "".join(did_you_mean(flag, known) for flag in flags)
        elif match := _CHOICE.fullmatch(message):
            message = _no_choice(match[1], match[2], re.findall(r"[^\s',]+", match[3]))
        raise FlagRefused(message)


def _options_of_ours() -> Iterator[str]:
    """Yield the options of the command that reads the line, and of those to which it belongs."""
    context = click.get_current_context(silent=True)
    while context is not None:
        for parameter in context.command.get_params(context):
            yield from (*parameter.opts, *parameter.secondary_opts)
        context = context.parent


def _no_choice(flag: str, value: str, choices: Collection[str]) -> str:
    """Say that a flag's value is none of the choices, of which vLLM may have dozens."""
    meant = did_you_mean(value, choices) or f" (choose from {', '.join(map(repr, choices))})"
    return f"argument {flag}: invalid choice: {value!r}{meant}"


def serve_parser() -> ServeParser:
    """Return the parser of `vllm serve`."""
    return make_arg_parser(ServeParser(prog="vllm serve"))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """The flags of a line that are the engine's, as fields of EngineArgs, and names of the API server's."""

    arguments: dict[str, JsonValue]
    api_server: list[str]


def read_engine_flags(arguments: Sequence[str]) -> EngineFlags:
    """Return what a line gives; what it leaves out is left out. Raise FlagRefused."""
    parser = serve_parser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS
        if action.type is not None:
            action.type = _plain(action.type)
    try:
        # With a model in its place: otherwise the word after an unknown flag would be taken for it.
        given: dict[str, Any] = vars(parser.parse_args(["model", *arguments]))
    except (AssertionError, TypeError, ValueError, OSError) as error:
        # Of the parser itself, or of a --config file.
        raise FlagRefused(one_line(error)) from error
    known = {each.name for each in fields(EngineArgs)}
    others = given.keys() - known - {"config", "model_tag"}
    return EngineFlags({name: given[name] for name in given if name in known}, sorted(others))


def read_serve_arguments(parser: ServeParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse and check a line as vLLM's API server does before it loads anything. Raise FlagRefused.

    `arguments`: the model, and flags. The parsers of plugins are imported.
    """
    # What the API server imports as it is; a worker need not.
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args
    from vllm.entrypoints.launchers.launcher import validate_api_server_args
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    args: argparse.Namespace = parser.parse_args(arguments)
    if args.model_tag is not None:
        args.model = args.model_tag
    # A plugin's parser is not registered, and so not valid, before it is imported.
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    # vLLM checks the second one only when it builds the app, and names dozens of others.
    tool_parsers, reasoning_parsers = (
        ToolParserManager.list_registered(),
        ReasoningParserManager.list_registered(),
    )
    if args.enable_auto_tool_choice and args.tool_call_parser and args.tool_call_parser not in tool_parsers:
        raise FlagRefused(_no_choice("--tool-call-parser", args.tool_call_parser, sorted(tool_parsers)))
    if args.reasoning_parser and args.reasoning_parser not in reasoning_parsers:
        raise FlagRefused(_no_choice("--reasoning-parser", args.reasoning_parser, sorted(reasoning_parsers)))
    try:
        validate_parsed_serve_args(args)
        validate_api_server_args(args)
    except KeyError as error:
        raise FlagRefused(without_pydantic(str(error.args[0]))) from error
    except (TypeError, ValueError, VLLMValidationError) as error:
        raise FlagRefused(one_line(error).removeprefix("Error: ")) from error
    return args


def _plain(parse: Any) -> Callable[[str], Any]:
    """Return a parser of values that checks them as this one does, and leaves objects as their JSON: other
    machines and our own checks read these."""

    def parse_plainly(text: str) -> Any:
        value = parse(text)
        if is_dataclass(value):
            return json.loads(text)
        return sorted(value) if isinstance(value, (set, frozenset)) else value

    # argparse names it in errors.
    parse_plainly.__name__ = getattr(parse, "__name__", "value")
    return parse_plainly
