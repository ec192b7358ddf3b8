"""Encode and decode answers as sent between front ends (protos/tailrace/v1/answers.proto)."""

from __future__ import annotations

import sys
from typing import Final

from frontend_svc.answers.store import Head, LogEntry, Part, PartRefusal
from tailrace.v1 import answers_pb2

REFUSAL_REASONS: Final = {
    PartRefusal.SUPERSEDED: answers_pb2.KEEP_REFUSAL_REASON_SUPERSEDED,
    PartRefusal.KEY_IN_USE: answers_pb2.KEEP_REFUSAL_REASON_KEY_IN_USE,
    PartRefusal.FULL: answers_pb2.KEEP_REFUSAL_REASON_FULL,
    PartRefusal.GAP: answers_pb2.KEEP_REFUSAL_REASON_GAP,
}
_REFUSALS: Final = {reason: refused for refused, reason in REFUSAL_REASONS.items()}


def decode_refusal(reason: answers_pb2.KeepRefusalReason.ValueType) -> PartRefusal:
    """Return the refusal of a reply; a reason of a later version is treated as lack of room."""
    return _REFUSALS.get(reason, PartRefusal.FULL)


def encode_part(part: Part) -> answers_pb2.AnswerPart:
    """Return the part as a protobuf message."""
    message = answers_pb2.AnswerPart(
        answer_id=part.answer_id,
        run=part.run,
        ended=part.ended,
        first_entry=part.first_entry,
        entries=[
            answers_pb2.AnswerEntry(
                part=entry.part,
                token_ids=entry.token_ids,
                flags=entry.flags,
                frames=entry.frames,
                model=entry.model,
            )
            for entry in part.entries
        ],
        complete=part.complete,
        frontend_id=part.frontend_id,
    )
    if part.head is not None:
        head = part.head
        message.head.CopyFrom(
            answers_pb2.AnswerHead(
                tenant=head.tenant,
                idempotency_key=head.key,
                path=head.path,
                body=head.body,
                digest=head.digest,
                request_name=head.request_name,
                created_s=head.created_s,
                streams=head.streams,
            )
        )
    return message


def _decode_entry(message: answers_pb2.AnswerEntry) -> LogEntry:
    # Interned, because all entries of a part share its name.
    part = sys.intern(message.part)
    return LogEntry(part, tuple(message.token_ids), message.flags, tuple(message.frames), message.model)


def decode_part(message: answers_pb2.AnswerPart) -> Part:
    """Return the part that a protobuf message holds."""
    head = None
    if message.HasField("head"):
        encoded = message.head
        head = Head(
            message.answer_id,
            encoded.tenant,
            encoded.idempotency_key,
            encoded.path,
            encoded.body,
            encoded.digest,
            encoded.request_name,
            encoded.created_s,
            encoded.streams,
        )
    return Part(
        message.answer_id,
        message.run,
        head,
        dict(message.ended),
        message.first_entry,
        [_decode_entry(entry) for entry in message.entries],
        message.complete,
        message.frontend_id,
    )
