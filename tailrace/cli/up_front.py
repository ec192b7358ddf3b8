"""Which API servers a cluster on this machine gets, if nobody says it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tailrace.address import format_address
from tailrace.cli.line_check import vllm_rs_refusal
from tailrace.local.options import ClusterOptions, Engine, Front
from tailrace.local.requirements import Missing, require_proxy, vllm_version
from tailrace.service import vllm_rs

# Options of front ends that are those of the edge before them, too.
_INSECURE: Final = "--insecure"
_KEYS: Final = "--api-keys"


def with_front(options: ClusterOptions, say: Callable[[str], None]) -> ClusterOptions:
    """Return the options with the API servers of each model, and an edge if one has both.

    `say` is told why the Python app serves alone.
    """
    models = [replace(each, front=_front(each, say)) for each in options.models]
    edge, arguments = options.edge, options.edge_arguments
    if not edge and models[0].front is Front.BOTH:
        edge = format_address(options.host, options.port)
        arguments = _edge_arguments(options.frontend_arguments)
    return replace(models[0], others=tuple(models[1:]), edge=edge, edge_arguments=arguments)


def _edge_arguments(frontend: Sequence[str]) -> tuple[str, ...]:
    found, words = [], iter(frontend)
    for word in words:
        if word == _KEYS:
            found += [word, next(words)]
        elif word == _INSECURE or word.startswith(f"{_KEYS}="):
            found.append(word)
    return tuple(found)


def _front(options: ClusterOptions, say: Callable[[str], None]) -> Front:
    if options.front is not Front.AUTO:
        return options.front
    if options.engine is Engine.SIMULATED and not vllm_version():
        return Front.RUST
    why = _python_alone({**os.environ, **options.environment}, options)
    if not why:
        return Front.BOTH
    say(f"{options.served_name} is served by vLLM's Python app alone, which is slower: {why}")
    return Front.PYTHON


def _files(options: ClusterOptions) -> Path | None:
    """Return the model's folder or file, of a hub's name that in its cache; None: it is not here yet."""
    if (path := Path(options.model).expanduser()).exists():
        return path
    if find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(
            options.model, "config.json", revision=options.line.last("revision") or None
        )
    except HFValidationError:
        # It names neither; who starts it says so.
        return None
    return Path(found).parent if isinstance(found, str) else None


def _python_alone(environment: Mapping[str, str], options: ClusterOptions) -> str:
    """Return why vllm-rs does not serve what it can; empty if it does."""
    executable, flags = vllm_rs.find(), options.line.flags
    if executable is None:
        return f"vllm-rs is not installed (python -m {vllm_rs.__name__} fetches it)"
    try:
        require_proxy()
        problem = vllm_rs_refusal(options)
        if not problem and (files := _files(options)) is not None:
            problem = vllm_rs.model_problem(executable, files)
    except (Missing, OSError) as error:
        return str(error)
    if environment.get("VLLM_API_KEY") or "api_key" in flags:
        return "with a key of vLLM's own (VLLM_API_KEY), vllm-rs leaves /tokenize open"
    if environment.get("VLLM_SERVER_DEV_MODE", "0") not in ("", "0"):
        return "an edge does not lead to the routes of VLLM_SERVER_DEV_MODE"
    if any(name.startswith("ssl_") for name in flags):
        return "the HTTPS of vLLM's API server (--ssl-...) ends there, not at an edge"
    if options.line.last("runner") == "pooling":
        return "vllm-rs does not serve pooling models"
    return problem
