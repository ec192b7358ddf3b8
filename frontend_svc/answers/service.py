"""The gRPC service by which front ends keep each other's answers, and the set-up of kept answers."""

from __future__ import annotations

from typing import Final

import grpc
from prometheus_client import CollectorRegistry

from frontend_svc.answers.coordinator import AnswerCoordinator
from frontend_svc.answers.metrics import AnswerMetrics
from frontend_svc.answers.peers import FrontEndPeers, rendezvous_rank
from frontend_svc.answers.store import AnswerStore
from frontend_svc.settings import Settings
from tailrace.members import Members
from tailrace.service.channels import Channels
from tailrace.service.server import Servicer
from tailrace.v1 import answers_pb2, answers_pb2_grpc

Context = grpc.aio.ServicerContext[answers_pb2.KeepRequest, answers_pb2.KeepReply]
FindContext = grpc.aio.ServicerContext[answers_pb2.FindAnswerRequest, answers_pb2.FindAnswerReply]
ClaimContext = grpc.aio.ServicerContext[answers_pb2.ClaimAnswerRequest, answers_pb2.ClaimAnswerReply]

SERVICE: Final = "tailrace.v1.Answers"


class AnswersServicer(answers_pb2_grpc.AnswersServicer):
    """Implement tailrace.v1.Answers; see answers.proto."""

    def __init__(self, coordinator: AnswerCoordinator) -> None:
        self._coordinator = coordinator

    async def Keep(self, request: answers_pb2.KeepRequest, context: Context) -> answers_pb2.KeepReply:
        """Apply parts of answers that another front end serves."""
        return self._coordinator.handle_keep(request)

    async def Find(
        self, request: answers_pb2.FindAnswerRequest, context: FindContext
    ) -> answers_pb2.FindAnswerReply:
        """Return what is known of an answer here."""
        return self._coordinator.handle_find(request)

    async def Claim(
        self, request: answers_pb2.ClaimAnswerRequest, context: ClaimContext
    ) -> answers_pb2.ClaimAnswerReply:
        """Hand an answer over."""
        return self._coordinator.handle_claim(request)


def answers_servicer(coordinator: AnswerCoordinator) -> Servicer:
    """Return the servicer for the front end's gRPC server."""
    return Servicer(answers_pb2_grpc.add_AnswersServicer_to_server, AnswersServicer(coordinator), SERVICE)


def keep_answers(
    settings: Settings, setting: str, members: Members, channels: Channels, registry: CollectorRegistry
) -> AnswerCoordinator:
    """Build the coordinator of a front end that keeps answers. `setting`: see FrontEndPeers."""
    store = AnswerStore(settings.frontend_id, settings.keep_answers_bytes, rendezvous_rank)
    peers = FrontEndPeers(members, settings.frontend_id, setting, channels)
    return AnswerCoordinator(
        settings.frontend_id, settings.keep_answers_s, store, peers, AnswerMetrics(registry)
    )
