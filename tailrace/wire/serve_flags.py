"""Read flags of `vllm serve` by vLLM's own parser. Importing this module imports vLLM."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NoReturn

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tailrace.json_value import JsonValue
from tailrace.wire.setting_errors import one_line, without_pydantic


class FlagRefused(ValueError):
    """vLLM does not accept a flag or its value; the message names the flag."""


class ServeParser(FlexibleArgumentParser):  # type: ignore[misc]
    """vLLM's parser, whose error is an exception and not the usage of a few hundred flags."""

    def error(self, message: str) -> NoReturn:
        """Raise FlagRefused."""
        raise FlagRefused(without_pydantic(message))


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
