"""What is tried again: streams that end before a test gets to them, and calls that are refused for now."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import grpc

from tests.waiting import WAIT_S

TRIES: Final = 5
"""How often a test tries: on a busy machine a stream may end before the test gets to it."""
_PAUSE_S: Final = 0.1

Result = TypeVar("Result")


class RequestEnded(RuntimeError):
    """A request ended, or what a test was to find was over, before the test got to it."""


def before_it_ends(attempt: Callable[[], Result]) -> Result:
    """Return what an attempt returns; make it again, with another stream, as long as it raises RequestEnded,
    which is raised after `TRIES` attempts."""
    for _ in range(TRIES - 1):
        try:
            return attempt()
        except RequestEnded:
            continue
    return attempt()


async def before_they_end(attempt: Callable[[], Awaitable[Result]]) -> Result:
    """Do as `before_it_ends` with a coroutine."""
    for _ in range(TRIES - 1):
        try:
            return await attempt()
        except RequestEnded:
            continue
    return await attempt()


def once_available(call: Callable[[], Result]) -> Result:
    """Return what a call of the admin API returns; make it again as long as nobody can carry it out: no
    scheduler leads, or etcd is late. Raise grpc.RpcError."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            return call()
        except grpc.RpcError as refused:
            if not is_refused_for_now(refused) or time.monotonic() > deadline_s:
                raise
        time.sleep(_PAUSE_S)


def is_refused_for_now(error: grpc.RpcError) -> bool:
    """Return whether a call was refused only for now; or what it sets is not yet followed everywhere."""
    if not isinstance(error, grpc.Call):
        return False
    return error.code() is grpc.StatusCode.UNAVAILABLE or "has not followed it within" in str(error.details())
