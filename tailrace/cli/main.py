"""The `tailrace` command: wiring only. Each group of commands has its own file next to this one."""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem

from tailrace import __version__
from tailrace.collector import collector_paused

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# A folder in which the processes of one server add up their metrics. Each of ours has its own, and would
# begin with what a process of the same id has left there. Read when prometheus_client is imported.
_SHARED_METRICS: Final = "PROMETHEUS_MULTIPROC_DIR"
_UNWRITABLE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})

# The location of each command, and its line of help, so that neither help nor completion imports it.
_COMMANDS: Final = {
    "up": ("tailrace.cli.up:up", "Start a local cluster."),
    "restart": ("tailrace.cli.restart:restart", "Restart processes of the local cluster while it serves."),
    "down": ("tailrace.cli.down:down", "Stop the local cluster."),
    "apply": ("tailrace.cli.apply:apply", "Bring a running cluster to what its fleet.yaml says."),
    "render": ("tailrace.cli.render:render", "Make a folder for each host of a fleet.yaml."),
    "config": ("tailrace.cli.config:config", "Check a fleet.yaml, or show what it means."),
    "get": ("tailrace.cli.get:get", "Show instances, requests, migrations and more."),
    "doctor": ("tailrace.cli.doctor:doctor", "Look for what this host or the fleet lacks."),
    "describe": ("tailrace.cli.describe:describe", "Show all that is known of an instance or request."),
    "logs": ("tailrace.cli.logs:logs", "Print the logs of the local cluster."),
    "top": ("tailrace.cli.top:top", "Live view in the terminal."),
    "migrate": ("tailrace.cli.migrate:migrate", "Migrate a running request to another instance."),
    "drain": ("tailrace.cli.drain:drain", "Drain an instance, or undrain it."),
    "rollout": ("tailrace.cli.rollout:rollout", "Roll out new weights of a model while it serves."),
    "profile": ("tailrace.cli.profile:profile", "Profile the speed of an instance, for the policies."),
    "set": ("tailrace.cli.set:set_", "Change policy, shadow policy, SLOs, pools and stages."),
    "record": ("tailrace.cli.record:record", "Record the scheduler's inputs and decisions."),
    "replay": ("tailrace.cli.replay:replay", "Replay a recording with the same policy, or another one."),
    "trace": ("tailrace.cli.trace:trace", "Print the trace of one request as a tree."),
    "serve": ("tailrace.cli.serve:serve", "Run one service."),
    "certs": ("tailrace.cli.certs:certs", "Create and renew certificates."),
    "keys": ("tailrace.cli.keys:keys", "Create, list and revoke users' API keys."),
    "etcd-roles": ("tailrace.cli.etcd_roles:etcd_roles", "Show and set up each service's rights in etcd."),
    "completion": (
        "tailrace.cli.completion:completion",
        "Print a script that completes commands in a shell.",
    ),
    "version": ("tailrace.cli.version:version", "Print versions."),
}

# Commands of other packages, such as the simulator; they are not imported here.
_PLUGINS: Final = "tailrace.commands"
_PLUGIN_HELP: Final = {
    "simulate": "Run one policy on a workload in the simulator.",
    "compare": "Compare several policies on workloads.",
    "size": "Find how many instances a workload needs.",
    "claims": "Reproduce the papers' claims in the simulator.",
    "predictor": "Collect samples for, train and evaluate an output-length predictor.",
    "validate": "Replay measured runs in the simulator and report its error.",
}


class _Tailrace(click.Group):
    """The commands of `_COMMANDS`, and those that installed packages add with entry points, which are listed
    after them: first those in `_PLUGIN_HELP`, with its lines, then others with their location."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command and exit. Output that cannot be written (a full disk), text that is not UTF-8 and a
        removed working directory are errors of one line."""
        _open_standard_streams()
        try:
            _guard_module_path()
            os.environ.pop(_SHARED_METRICS, None)
            try:
                return super().main(*args, **kwargs)
            finally:
                sys.stdout.flush()
        except UnicodeEncodeError as error:
            # Python decodes what is not text to surrogates, which no message and no file can have.
            click.echo(f"tailrace: {error.object!a} is not UTF-8 in this locale (LC_ALL, LANG)", err=True)
            sys.exit(2)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and _working_directory() is None:
                click.echo("tailrace: the working directory has been removed; go to another one", err=True)
                sys.exit(1)
            if error.errno not in _UNWRITABLE:
                raise
            # Python writes what is left at exit, and would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            click.echo(f"tailrace: the output cannot be written: {error.strerror}", err=True)
            sys.exit(1)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command. An error suggests names that are like the given one."""
        try:
            return super().resolve_command(ctx, args)
        except click.exceptions.NoSuchCommand as error:
            raise click.exceptions.NoSuchCommand(
                error.command_name, possibilities=self.list_commands(ctx), ctx=ctx
            ) from None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands that begin so, without importing them."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        lines = {name: summary for name, (_, summary) in _COMMANDS.items()} | self._plugin_lines()
        return [
            CompletionItem(name, help=line) for name, line in lines.items() if name.startswith(incomplete)
        ]

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the given order, that of a first session."""
        return [*_COMMANDS, *self._plugin_lines()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command, or None if there is no such name.

        Raise CliError if a plugin's command needs a package that is not installed.
        """
        if cmd_name in _COMMANDS:
            place = _COMMANDS[cmd_name][0]
            module, _, attribute = place.partition(":")
            with collector_paused():
                imported = import_module(module)
            return _checked(getattr(imported, attribute), place)
        point = self._points().get(cmd_name)
        if point is None:
            return None
        try:
            with collector_paused():
                command: object = point.load()
        except ModuleNotFoundError as error:
            # Imported here, since it imports gRPC and `tailrace --help` must be fast.
            from tailrace.cli.errors import CliError

            raise CliError(f"{cmd_name}: {error}; scripts/install.sh installs what is missing") from error
        return _checked(command, point.value)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        lines = [(name, summary) for name, (_, summary) in _COMMANDS.items()]
        with formatter.section("Commands"):
            formatter.write_dl([*lines, *self._plugin_lines().items()])

    def _plugin_lines(self) -> dict[str, str]:
        points = self._points()
        known = {name: line for name, line in _PLUGIN_HELP.items() if name in points}
        return known | {name: points[name].value for name in sorted(points) if name not in known}

    def _points(self) -> dict[str, EntryPoint]:
        """Return the plugins' entry points; built-in commands take precedence."""
        # Imported here, since no built-in command needs it.
        from importlib.metadata import entry_points

        points = entry_points(group=_PLUGINS)
        return {point.name: point for point in points if point.name not in _COMMANDS}


def _open_standard_streams() -> None:
    """Open /dev/null in place of standard streams that are closed: a file or socket would get their numbers,
    and then what libraries print."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != number:
                os.dup2(nothing, number)
                os.close(nothing)
            # What is started, such as an API server, inherits it.
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "r+" if number else "r", closefd=False))  # noqa: SIM115


def _guard_module_path() -> None:
    """Have processes that are started look for modules where this one does: `python -m` looks in the working
    directory first, where a user's `types.py` or `tests` may be."""
    directory = _working_directory()
    if directory is None or not {directory, ""}.intersection(sys.path):
        os.environ["PYTHONSAFEPATH"] = "1"


def _working_directory() -> str | None:
    """Return the working directory; None: it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _checked(command: object, module: str) -> click.Command:
    if not isinstance(command, click.Command):
        raise TypeError(f"{module} is not a click command")
    return command


@click.group(
    "tailrace",
    cls=_Tailrace,
    epilog="Exit codes: 1 failure, 2 wrong usage, 3 no scheduler can be reached, or none leads: try again.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, message="tailrace %(version)s")
def main() -> None:
    """The control plane for a fleet of vLLM instances."""
