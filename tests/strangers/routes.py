"""`python -m tests.strangers.routes`: the routes of vLLM's app for every task, with those of its
development mode and those for adapters; JSON on stdout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final, get_args

import msgspec

from tailrace.tiny import MODEL_PATH

DEVELOPMENT: Final = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
"""Environment in which vLLM's Python app has all of its routes."""
_LIST_S: Final = 120.0


class Route(msgspec.Struct, frozen=True):
    """A path of the app and its declared methods, of which a mounted app and a WebSocket have none."""

    path: str
    methods: tuple[str, ...]


def app_routes() -> list[Route]:
    """Return the routes, listed in a process of its own: vLLM reads the environment when it is imported."""
    environment = {**os.environ, **DEVELOPMENT}
    command = [sys.executable, "-m", "tests.strangers.routes"]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True, timeout=_LIST_S)
    # vLLM logs on stdout.
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=list[Route])


def _all_tasks(alias: Any) -> Iterator[str]:  # a union of literals
    for argument in get_args(alias):
        if isinstance(argument, str):
            yield argument
        else:
            yield from _all_tasks(argument)


def main() -> int:
    """List the routes; see the module."""
    from vllm.entrypoints.openai.api_server import build_app
    from vllm.tasks import SupportedTask

    from frontend_svc.api_server.python_app import parse_arguments

    app = build_app(parse_arguments([str(MODEL_PATH)]), tuple(dict.fromkeys(_all_tasks(SupportedTask))))
    # A route of a kind without a path is an error: it would not be tried.
    found = [
        Route(re.sub(r"\{[^}]*\}", "x", route.path), tuple(sorted(getattr(route, "methods", None) or ())))
        for route in app.routes
    ]
    print(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
