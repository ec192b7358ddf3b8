"""The service by which front ends keep each other's answers, and what a front end needs to keep any."""

from __future__ import annotations

from typing import Final

import grpc
from prometheus_client import CollectorRegistry

from frontend_svc.answers.book import AnswerBook
from frontend_svc.answers.desk import AnswerDesk
from frontend_svc.answers.metrics import AnswerMetrics
from frontend_svc.answers.peers import Peers, rank
from frontend_svc.settings import Settings
from tailrace.service.channels import Channels, Services
from tailrace.service.server import Servicer
from tailrace.v1 import answers_pb2, answers_pb2_grpc

Context = grpc.aio.ServicerContext[answers_pb2.KeepRequest, answers_pb2.KeepReply]
FindContext = grpc.aio.ServicerContext[answers_pb2.FindAnswerRequest, answers_pb2.FindAnswerReply]
ClaimContext = grpc.aio.ServicerContext[answers_pb2.ClaimAnswerRequest, answers_pb2.ClaimAnswerReply]

SERVICE: Final = "tailrace.v1.Answers"


class AnswersServicer(answers_pb2_grpc.AnswersServicer):
    """See answers.proto."""

    def __init__(self, desk: AnswerDesk) -> None:
        self._desk = desk

    async def Keep(self, request: answers_pb2.KeepRequest, context: Context) -> answers_pb2.KeepReply:
        """Take in what another front end's answers got."""
        return self._desk.keep(request)

    async def Find(
        self, request: answers_pb2.FindAnswerRequest, context: FindContext
    ) -> answers_pb2.FindAnswerReply:
        """What is known of an answer here."""
        return self._desk.find(request)

    async def Claim(
        self, request: answers_pb2.ClaimAnswerRequest, context: ClaimContext
    ) -> answers_pb2.ClaimAnswerReply:
        """Hand an answer over."""
        return self._desk.hand_over(request)


def answers_servicer(desk: AnswerDesk) -> Servicer:
    """For the front end's gRPC server."""
    return Servicer(answers_pb2_grpc.add_AnswersServicer_to_server, AnswersServicer(desk), SERVICE)


def keep_answers(
    settings: Settings, setting: str, members: Services, channels: Channels, registry: CollectorRegistry
) -> AnswerDesk:
    """The desk of a front end. `setting`: see Peers."""
    book = AnswerBook(settings.frontend_id, settings.keep_answers_bytes, rank)
    peers = Peers(members, settings.frontend_id, setting, channels)
    return AnswerDesk(settings.frontend_id, settings.keep_answers_s, book, peers, AnswerMetrics(registry))
