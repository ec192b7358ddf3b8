"""Check a `vllm serve` line, and options of services, before anything starts with them.

The services' own commands check them, and vLLM's own parser its flags, in a process of its own: loading vLLM
takes seconds, and sets up much else. `python -m tailrace.cli.line_check` is that process: it reads a _Check
from stdin, and writes what is refused to stdout.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Final

import click
import msgspec

from tailrace.address import format_address
from tailrace.cli.errors import CliError
from tailrace.cli.serve import service_command
from tailrace.collector import collector_paused
from tailrace.local.options import ClusterOptions, Engine, Front
from tailrace.local.process import DECIDED
from tailrace.local.requirements import vllm_version
from tailrace.service import vllm_rs
from tailrace.service.runtime import only_checking
from tailrace.tiny import MODEL_PATH

# Loading vLLM on a busy machine, and from a slow disk.
_TIMEOUT_S: Final = 300.0
_API_SERVER: Final = "API server"
_FLAGS: Final = "flags"
# Flags of which vLLM's parser takes any words, so that it need not be loaded to know that.
_ANY_WORDS: Final = frozenset({"--api-key", "--served-model-name"})


class _Line(msgspec.Struct, frozen=True):
    # A service, or: what vLLM's API server reads, which a front end starts; flags that nobody else reads.
    kind: str
    arguments: list[str]


class _Check(msgspec.Struct, frozen=True):
    lines: list[_Line]
    # Options of the command that took the line, which may have been meant.
    options: list[str]


def needs_vllm(options: ClusterOptions) -> bool:
    """Return whether vLLM reads the line; of what is not installed nothing can be checked."""
    words = options.line.arguments
    # A worker with vLLM's engine loads it for any line.
    unread = options.engine is Engine.SIMULATED and _takes_any_words(words)
    return bool(words) and not unread and bool(vllm_version())


def _takes_any_words(words: Sequence[str]) -> bool:
    """Return whether there is nothing but flags that take any words, each with some that are plain."""
    return all(
        (following if word in _ANY_WORDS else word)[:1] not in ("", "-")
        for word, following in pairwise((*words, ""))
    )


def refusal(options: ClusterOptions) -> str:
    """Return why a worker or a front end of the options' first model would not start; empty if both would.

    Takes seconds if vLLM reads the line. Raise CliError if the check cannot be done.
    """
    line = [*options.line.arguments]
    common = ["--model", options.model]
    http = format_address(options.host, options.port)
    lines = []
    # First what takes no vLLM.
    for front in _fronts(options.front):
        if front is Front.PYTHON or vllm_rs.find() is not None:
            served = ["--http", http, "--front", front.value]
            lines.append(_Line("frontend", [*served, *common, *options.frontend_arguments, *line]))
    if options.engine is Engine.SIMULATED or vllm_version():
        engine = ["--engine", options.engine.value]
        lines.append(_Line("worker", [*engine, *common, *options.worker_arguments, *line]))
    if needs_vllm(options):
        # vllm-rs has other parsers, and the simulated engine reads few flags.
        kind = _FLAGS if options.front is Front.RUST else _API_SERVER
        lines.append(_Line(kind, [options.model, *options.line.without("host", "port").arguments]))
    return _checked(lines, options.environment)


def _fronts(front: Front) -> tuple[Front, ...]:
    match front:
        case Front.BOTH:
            return (Front.RUST, Front.PYTHON)
        case Front.RUST:
            return (Front.RUST,)
    return (Front.PYTHON,)


def vllm_rs_refusal(options: ClusterOptions) -> str:
    """Return why a front end with vllm-rs would refuse what the options' first model is given; empty if it
    would not. Whether users may reach it, and what its model is, is another question."""
    arguments = ["--front", Front.RUST.value, "--model", str(MODEL_PATH), "--insecure"]
    given = [*options.frontend_arguments, *options.line.without("host", "port").arguments]
    return _problem(_Check([_Line("frontend", [*arguments, *given])], []))


def loads_vllm(options: ClusterOptions) -> bool:
    """Return whether `refusal` may load vLLM, which takes seconds: a worker with its engine does for any
    line."""
    return needs_vllm(options) or (options.engine is Engine.VLLM and bool(vllm_version()))


def _checked(lines: Sequence[_Line], environment: Mapping[str, str]) -> str:
    context = click.get_current_context()
    options = [name for each in context.command.get_params(context) for name in each.opts]
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=msgspec.json.encode(_Check([*lines], options)),
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", **environment},
            capture_output=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise CliError(f"the flags were not checked within {_TIMEOUT_S:.0f} s: try again") from error
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise CliError(f"the flags could not be checked: {last or f'exit code {done.returncode}'}")
    return done.stdout.decode(errors="replace").strip()


@contextmanager
def _environment_of_parts() -> Iterator[None]:
    """Take from the environment what no part inherits."""
    taken = {name: os.environ.pop(name) for name in DECIDED & os.environ.keys()}
    try:
        yield
    finally:
        os.environ.update(taken)


def _problem(check: _Check) -> str:
    """Return the first refusal; empty if there is none."""
    taker = click.Command("tailrace", params=[click.Option([name]) for name in check.options])
    parent = click.Context(taker)
    for line in check.lines:
        try:
            if line.kind in (_API_SERVER, _FLAGS):
                with parent.scope(cleanup=False):
                    _read_by_vllm(line)
            else:
                with only_checking(), _environment_of_parts():
                    service_command(line.kind).main(
                        line.arguments, prog_name=line.kind, standalone_mode=False, parent=parent
                    )
        except click.ClickException as error:
            return error.format_message()
    return ""


def _read_by_vllm(line: _Line) -> None:
    """Raise click.UsageError if vLLM would refuse the line."""
    with collector_paused():
        from tailrace.wire.serve_flags import (
            FlagRefused,
            read_engine_flags,
            read_serve_arguments,
            serve_parser,
        )

    try:
        if line.kind == _FLAGS:
            read_engine_flags(line.arguments[1:])
        else:
            read_serve_arguments(serve_parser(), line.arguments)
    except FlagRefused as error:
        raise click.UsageError(str(error)) from error


def _main() -> None:
    # vLLM and what it loads may print: of that nothing is an answer.
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    check = msgspec.json.decode(sys.stdin.buffer.read(), type=_Check)
    with os.fdopen(answer, "w") as file:
        file.write(_problem(check))


if __name__ == "__main__":
    _main()
