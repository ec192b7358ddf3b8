"""The `tailrace` command: wiring only. One file beside this one holds one group of commands."""

from __future__ import annotations

from tailrace.cli.lazy import LazyGroup

_COMMANDS = {
    "up": ("tailrace.cli.up:up", "Start a whole local cluster."),
    "restart": ("tailrace.cli.restart:restart", "Restart parts of the local cluster while it serves."),
    "down": ("tailrace.cli.down:down", "Stop the local cluster."),
    "get": ("tailrace.cli.get:get", "Show instances, requests, migrations and more."),
    "top": ("tailrace.cli.top:top", "Live view in the terminal."),
    "migrate": ("tailrace.cli.migrate:migrate", "Move a running request to another instance."),
    "drain": ("tailrace.cli.drain:drain", "Empty an instance, or take it back."),
    "rollout": ("tailrace.cli.rollout:rollout", "Bring in new weights of a model while it serves."),
    "profile": ("tailrace.cli.profile:profile", "Measure how fast an instance is, for the policies."),
    "set": ("tailrace.cli.set:set_", "Change policy, shadow policy, SLOs, pools and stages."),
    "record": ("tailrace.cli.record:record", "Record what the scheduler knows and decides."),
    "replay": ("tailrace.cli.replay:replay", "Put a recording to the same policy again, or to another."),
    "trace": ("tailrace.cli.trace:trace", "Print the trace of one request as a tree."),
    "serve": ("tailrace.cli.serve:serve", "Run one service."),
    "certs": ("tailrace.cli.certs:certs", "Make and renew certificates."),
    "keys": ("tailrace.cli.keys:keys", "Make, list and revoke API keys of users."),
    "etcd-roles": ("tailrace.cli.etcd_roles:etcd_roles", "Show and set up what each service may do in etcd."),
    "version": ("tailrace.cli.version:version", "Print versions."),
}

# Commands of packages beside the library, the simulator's among them; nothing here imports one.
_PLUGINS = "tailrace.commands"
_PLUGIN_HELP = {
    "simulate": "Run one policy on a workload in the simulator.",
    "compare": "Run several policies on workloads, side by side.",
    "claims": "Check the papers' claims in the simulator.",
    "predictor": "Collect for, train and evaluate a predictor of output lengths.",
    "validate": "Replay measured runs in the simulator and say how far off it is.",
}

main = LazyGroup(
    lazy=_COMMANDS,
    plugins=_PLUGINS,
    plugin_help=_PLUGIN_HELP,
    help="The control plane for a fleet of vLLM instances.",
    epilog="Exit codes: 1 it failed, 2 wrong usage, 3 the admin API cannot be reached.",
)
