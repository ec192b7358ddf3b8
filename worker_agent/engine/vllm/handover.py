"""How an engine's requests are handed over (live, by replay or not at all), from its configuration."""

from __future__ import annotations

import logging

from vllm.config import VllmConfig
from vllm.version import __version__ as vllm_version

from tailrace.handover import LIVE, Handover, TransferMode, by_replay
from worker_agent.engine.vllm.connectors import connector_reason
from worker_agent.engine.vllm.internals import TESTED_VERSIONS

_log = logging.getLogger(__name__)


def handover_of(config: VllmConfig) -> Handover:
    """Return how requests of this configuration are handed over: by replay if live migration is not possible,
    not at all for pooling models. Never raises."""
    if config.model_config.runner_type != "generate":
        return Handover(
            TransferMode.STAYS, "a pooling model's request ends with the step that computes its prompt"
        )
    reason = _version_reason(vllm_version) or _feature_reason(config)
    return by_replay(reason) if reason else LIVE


def _version_reason(version: str) -> str:
    """Return why this version cannot migrate live; empty for versions that live migration is tested with."""
    if ".".join(version.split(".")[:2]) in TESTED_VERSIONS:
        return ""
    tested = ", ".join(f"{each}.x" for each in TESTED_VERSIONS)
    _log.warning("vLLM %s is not among the tested versions (%s): requests migrate by replay", version, tested)
    return f"vLLM {version}: live migration is tested with {tested}"


def _feature_reason(config: VllmConfig) -> str:
    speculative = config.speculative_config
    if speculative is not None and speculative.method != "ngram":
        return f"speculative decoding by {speculative.method}: its draft model's state cannot be transferred"
    return _ranks_reason(config) or connector_reason(config)


def _ranks_reason(config: VllmConfig) -> str:
    """Return why an engine with these ranks cannot hand over KV live; empty if it can."""
    parallel = config.parallel_config
    if parallel.nnodes > 1:
        # The worker controls its ranks' transfers over sockets of this machine.
        return f"ranks on {parallel.nnodes} nodes"
    for setting in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, setting)
        if size != 1:
            return f"{setting} {size}: a block's tokens are spread over the ranks"
    return ""
