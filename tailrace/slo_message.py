"""Service-level objectives on the wire."""

from __future__ import annotations

from tailrace.slo import Slo
from tailrace.v1 import admin_pb2


def slo_message(slo: Slo) -> admin_pb2.Slo:
    """The message for `slo`; an objective that is not asked for is absent."""
    return admin_pb2.Slo(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s, qoe=slo.qoe, pace_s=slo.pace_s)


def slo_of(message: admin_pb2.Slo) -> Slo:
    """The SLO that the message tells."""
    given = given_objectives(message)
    return Slo(given.get("ttft"), given.get("tpot"), given.get("qoe"), given.get("pace"))


def given_objectives(message: admin_pb2.Slo) -> dict[str, float]:
    """The objectives that the message has, by the names of `tailrace.slo.OBJECTIVES`."""
    given: dict[str, float] = {}
    if message.HasField("ttft_s"):
        given["ttft"] = message.ttft_s
    if message.HasField("tpot_s"):
        given["tpot"] = message.tpot_s
    if message.HasField("qoe"):
        given["qoe"] = message.qoe
    if message.HasField("pace_s"):
        given["pace"] = message.pace_s
    return given
