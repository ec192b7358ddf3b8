"""The `tailrace` command: wiring only. Each group of commands has its own file next to this one."""

from __future__ import annotations

from tailrace.cli.lazy import LazyGroup

_COMMANDS = {
    "up": ("tailrace.cli.up:up", "Start a local cluster."),
    "restart": ("tailrace.cli.restart:restart", "Restart processes of the local cluster while it serves."),
    "down": ("tailrace.cli.down:down", "Stop the local cluster."),
    "get": ("tailrace.cli.get:get", "Show instances, requests, migrations and more."),
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
    "version": ("tailrace.cli.version:version", "Print versions."),
}

# Commands of other packages, such as the simulator; they are not imported here.
_PLUGINS = "tailrace.commands"
_PLUGIN_HELP = {
    "simulate": "Run one policy on a workload in the simulator.",
    "compare": "Compare several policies on workloads.",
    "claims": "Reproduce the papers' claims in the simulator.",
    "predictor": "Collect samples for, train and evaluate an output-length predictor.",
    "validate": "Replay measured runs in the simulator and report its error.",
}

main = LazyGroup(
    lazy=_COMMANDS,
    plugins=_PLUGINS,
    plugin_help=_PLUGIN_HELP,
    help="The control plane for a fleet of vLLM instances.",
    epilog="Exit codes: 1 failure, 2 wrong usage, 3 the admin API is unreachable.",
)
