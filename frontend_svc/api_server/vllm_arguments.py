"""Parse the arguments of vLLM's Python API server like `vllm serve`; end the process if one is refused.

vLLM's own parser answers a wrong argument with the usage of a few hundred others. Here it is one line in
click's form, "Error: ...", which names the argument, and click's exit status for a wrong command line.
"""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from typing import Final, NoReturn

from vllm import logger as vllm_logger
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from frontend_svc.api_server.spec import ARGUMENTS_REFUSED, DEFAULT_MAX_HEADER_BYTES
from tailrace.wire.setting_errors import one_line

# What pydantic appends to a message for developers.
_PYDANTIC: Final = re.compile(r" \[type=[^\]]*\]| For further information visit \S+")


def refuse(reason: str) -> NoReturn:
    """End the process: `reason`, which becomes one line, says which argument or setting is wrong."""
    print(f"Error: {_PYDANTIC.sub('', ' '.join(reason.split()))}", file=sys.stderr, flush=True)
    sys.exit(ARGUMENTS_REFUSED)


def parse_arguments(arguments: list[str]) -> Namespace:
    """Parse the arguments and import the parsers that they name. End the process if one is refused."""
    cli_env_setup()
    parser = make_arg_parser(_Parser(prog="vllm serve"))
    # vLLM's is 4 MiB, and counts only with the HTTP parser that it does not take.
    parser.set_defaults(h11_max_incomplete_event_size=DEFAULT_MAX_HEADER_BYTES)
    args: Namespace = parser.parse_args(arguments)
    if args.model_tag is not None:
        args.model = args.model_tag
    # vLLM 0.30 does not have this function.
    if hasattr(vllm_logger, "configure_logging_from_args"):
        vllm_logger.configure_logging_from_args(args)
    # A plugin's parser is not registered, and so not valid, before it is imported.
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    try:
        validate_parsed_serve_args(args)
        validate_api_server_args(args)
    except KeyError as error:
        refuse(error.args[0])
    except (TypeError, ValueError) as error:
        refuse(one_line(error).removeprefix("Error: "))
    # vLLM checks this one only when it builds the app.
    parsers = ReasoningParserManager.list_registered()
    if args.reasoning_parser and args.reasoning_parser not in parsers:
        choices = ", ".join(map(repr, sorted(parsers)))
        refuse(
            f"argument --reasoning-parser: invalid choice: {args.reasoning_parser!r} (choose from {choices})"
        )
    return args


def check_reasoning_parser(name: str, tokenizer: object) -> None:
    """End the process if the parser does not fit the model, as one whose marks its tokenizer lacks."""
    try:
        ReasoningParserManager.get_reasoning_parser(name)(tokenizer)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        refuse(f"argument --reasoning-parser: {name!r} does not fit this model: {one_line(error)}")


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]
    """vLLM's parser without the usage before an error."""

    def error(self, message: str) -> NoReturn:
        """End the process."""
        refuse(message)
