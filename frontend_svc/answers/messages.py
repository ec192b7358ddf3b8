"""Answers as they go between front ends (protos/tailrace/v1/answers.proto)."""

from __future__ import annotations

import sys
from typing import Final

from frontend_svc.answers.book import Entry, Head, Part, Refused
from tailrace.v1 import answers_pb2

REASONS: Final = {
    Refused.SUPERSEDED: answers_pb2.KEEP_REFUSAL_REASON_SUPERSEDED,
    Refused.KEY_IN_USE: answers_pb2.KEEP_REFUSAL_REASON_KEY_IN_USE,
    Refused.FULL: answers_pb2.KEEP_REFUSAL_REASON_FULL,
    Refused.GAP: answers_pb2.KEEP_REFUSAL_REASON_GAP,
}
_REFUSED: Final = {reason: refused for refused, reason in REASONS.items()}


def refused_of(reason: answers_pb2.KeepRefusalReason.ValueType) -> Refused:
    """What a reason that came with a reply means; one of a later version is as if there was no room."""
    return _REFUSED.get(reason, Refused.FULL)


def part_message(part: Part) -> answers_pb2.AnswerPart:
    """As it goes out."""
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


def _read_entry(said: answers_pb2.AnswerEntry) -> Entry:
    # All entries of a part share its name.
    return Entry(sys.intern(said.part), tuple(said.token_ids), said.flags, tuple(said.frames), said.model)


def read_part(message: answers_pb2.AnswerPart) -> Part:
    """As it came in."""
    head = None
    if message.HasField("head"):
        said = message.head
        head = Head(
            message.answer_id,
            said.tenant,
            said.idempotency_key,
            said.path,
            said.body,
            said.digest,
            said.request_name,
            said.created_s,
            said.streams,
        )
    return Part(
        message.answer_id,
        message.run,
        head,
        dict(message.ended),
        message.first_entry,
        [_read_entry(entry) for entry in message.entries],
        message.complete,
        message.frontend_id,
    )
