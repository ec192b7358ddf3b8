"""The `tailrace` command: wiring only. One file beside this one holds one group of commands."""

from __future__ import annotations

from tailrace.cli.lazy import LazyGroup

_COMMANDS = {
    "up": ("tailrace.cli.up:up", "Start a whole local cluster."),
    "down": ("tailrace.cli.down:down", "Stop the local cluster."),
    "get": ("tailrace.cli.get:get", "Show instances, requests, migrations and more."),
    "top": ("tailrace.cli.top:top", "Live view in the terminal."),
    "migrate": ("tailrace.cli.migrate:migrate", "Move a running request to another instance."),
    "drain": ("tailrace.cli.drain:drain", "Empty an instance, or take it back."),
    "set": ("tailrace.cli.set:set_", "Change policy, pools and stages."),
    "trace": ("tailrace.cli.trace:trace", "Print the trace of one request as a tree."),
    "serve": ("tailrace.cli.serve:serve", "Run one service."),
    "version": ("tailrace.cli.version:version", "Print versions."),
}

main = LazyGroup(
    lazy=_COMMANDS,
    help="The control plane for a fleet of vLLM instances.",
    epilog="Exit codes: 1 it failed, 2 wrong usage, 3 the admin API cannot be reached.",
)
