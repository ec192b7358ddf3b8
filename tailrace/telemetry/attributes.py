"""Names of span attributes. Every service takes them from here, so that one trace reads as one."""

from __future__ import annotations

from typing import Final

REQUEST_ID: Final = "tailrace.request_id"
"""The request's id as users and `tailrace get requests` know it; a trace is found by it."""

INSTANCE: Final = "tailrace.instance"
"""Id of the instance that the span's work happened on."""
FRONTEND: Final = "tailrace.frontend"
"""Id of the front end that holds the stream."""
PHASE: Final = "tailrace.phase"
"""prefill, reasoning or answering."""
EPOCH: Final = "tailrace.epoch"
"""The request's epoch: how many handovers it has had."""
POLICY: Final = "tailrace.policy"
"""Name of the policy that decided."""
REASON: Final = "tailrace.reason"
"""Why something was done: of a migration, a refusal, a recovery."""
OUTCOME: Final = "tailrace.outcome"
"""How the request ended: finished, aborted or error."""

PROMPT_TOKENS: Final = "tailrace.prompt_tokens"
OUTPUT_TOKENS: Final = "tailrace.output_tokens"
TOKENS: Final = "tailrace.tokens"
"""Tokens made in the span, or held by what it moved."""

MIGRATION_ID: Final = "tailrace.migration.id"
MIGRATION_SOURCE: Final = "tailrace.migration.source"
MIGRATION_TARGET: Final = "tailrace.migration.target"
MIGRATION_STATE: Final = "tailrace.migration.state"
"""committed or aborted."""
MIGRATION_WAY: Final = "tailrace.migration.way"
MIGRATION_WAY_REASON: Final = "tailrace.migration.way_reason"
MIGRATION_ROUNDS: Final = "tailrace.migration.rounds"
"""Copy rounds, the one under the pause included."""
MIGRATION_ROUND: Final = "tailrace.migration.round"
"""Number of one round, from 1; on a round's own span."""
MIGRATION_BLOCKS: Final = "tailrace.migration.blocks"
MIGRATION_BYTES: Final = "tailrace.migration.bytes"
MIGRATION_PAUSE_MS: Final = "tailrace.migration.pause_ms"
MIGRATION_PAUSE_STEPS: Final = "tailrace.migration.pause_steps"
"""The pause in the request's own decode steps."""

REQUEST_SPAN: Final = "request"
"""Name of the span of a request's whole life, made by its front end; the root unless a client sent one."""
