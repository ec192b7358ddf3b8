"""Names of span attributes, shared by all services so that traces are consistent."""

from __future__ import annotations

from typing import Final

REQUEST_ID: Final = "tailrace.request_id"
"""The request's id as in `tailrace get requests`; traces are looked up by it."""
CLIENT_REQUEST_ID: Final = "tailrace.client_request_id"
"""The id that the client sees, perhaps of its own choice; only in a request's first span."""

INSTANCE: Final = "tailrace.instance"
"""Id of the instance on which the span's work was done."""
FRONTEND: Final = "tailrace.frontend"
"""Id of the front end that holds the stream."""
PHASE: Final = "tailrace.phase"
"""prefill, reasoning or answering."""
EPOCH: Final = "tailrace.epoch"
"""The request's epoch: the number of its handovers."""
POLICY: Final = "tailrace.policy"
"""Name of the policy that decided."""
REASON: Final = "tailrace.reason"
"""Reason of a migration, a refusal or a recovery."""
OUTCOME: Final = "tailrace.outcome"
"""How the request ended: finished, aborted or error."""

PROMPT_TOKENS: Final = "tailrace.prompt_tokens"
CACHED_TOKENS: Final = "tailrace.cached_tokens"
"""Prompt tokens whose KV the chosen instance was known to hold."""
OUTPUT_TOKENS: Final = "tailrace.output_tokens"
TOKENS: Final = "tailrace.tokens"
"""Tokens generated in the span, or tokens whose KV it moved."""

PULL_HOLDER: Final = "tailrace.pull.holder"
"""The instance from which a prefix is pulled."""

MIGRATION_ID: Final = "tailrace.migration.id"
MIGRATION_SOURCE: Final = "tailrace.migration.source"
MIGRATION_TARGET: Final = "tailrace.migration.target"
MIGRATION_STATE: Final = "tailrace.migration.state"
"""committed or aborted."""
MIGRATION_WAY: Final = "tailrace.migration.way"
MIGRATION_WAY_REASON: Final = "tailrace.migration.way_reason"
MIGRATION_ROUNDS: Final = "tailrace.migration.rounds"
"""Number of copy rounds, including the one during the pause."""
MIGRATION_ROUND: Final = "tailrace.migration.round"
"""Number of a round, from 1; on the round's own span."""
MIGRATION_BLOCKS: Final = "tailrace.migration.blocks"
MIGRATION_BYTES: Final = "tailrace.migration.bytes"
MIGRATION_HELD_BYTES: Final = "tailrace.migration.held_bytes"
"""KV that was not copied because the target's prefix cache had it."""
MIGRATION_PAUSE_MS: Final = "tailrace.migration.pause_ms"
MIGRATION_PAUSE_STEPS: Final = "tailrace.migration.pause_steps"
"""Duration of the pause in decode steps of the request."""

REQUEST_SPAN: Final = "request"
"""Name of the span of a request's whole life, created by its front end; the root unless the client sent a
parent."""
