"""A request of an operator that cannot be done, as a gRPC status."""

from __future__ import annotations

import grpc


class Refused(Exception):
    """`details` says in one line what is wrong, and names the field where there is one."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
