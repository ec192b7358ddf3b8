"""Close a listening socket that several processes share without a client noticing.

Closing a listening socket resets the connections that the kernel has completed but nobody has accepted yet.
So first no new ones are made: a filter on the socket drops every SYN. A client repeats its SYN after a second
(RFC 6298), which then reaches whoever listens on the port by then: another front end that shares it, or this
one after a restart. Then the connections that exist are accepted, and the socket can be closed.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import socket
import struct
from typing import Final

log = logging.getLogger(__name__)

# Linux, include/uapi/asm-generic/socket.h and include/uapi/linux/filter.h.
_SO_ATTACH_FILTER: Final = 26
_INSTRUCTION: Final = struct.Struct("HBBI")
_LOAD_BYTE, _JUMP_IF_SET, _RETURN = 0x30, 0x45, 0x06
# Offset of the flags in a TCP header, where the filter's view of a packet begins, and the SYN bit.
_FLAGS_OFFSET: Final = 13
_SYN: Final = 0x02
_PROGRAM: Final = (
    (_LOAD_BYTE, 0, 0, _FLAGS_OFFSET),
    (_JUMP_IF_SET, 0, 1, _SYN),
    # Return values: drop the packet, or keep all of it.
    (_RETURN, 0, 0, 0),
    (_RETURN, 0, 0, 0xFFFFFFFF),
)
# include/uapi/linux/tcp.h: of a listening socket tcpi_unacked counts connections that wait to be accepted.
_TCP_INFO_BYTES: Final = 104
_UNACKED_OFFSET: Final = 24

# Time for handshakes in progress to finish and for the first bytes on new connections to be read.
_HANDSHAKE_S: Final = 0.25
_ACCEPT_S: Final = 2.0
_POLL_S: Final = 0.01


async def stop_accepting(listening: socket.socket) -> None:
    """Stop new connections and wait until the existing ones are accepted. Takes 2.25 s at most."""
    try:
        _drop_syns(listening)
    except OSError as error:
        log.debug("cannot filter SYNs, new connections will be reset: %s", error)
        return
    try:
        async with asyncio.timeout(_ACCEPT_S):
            # Another process accepts: there is no event to wait for.
            while _pending_connections(listening):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        log.warning("%d connections were not accepted in time", _pending_connections(listening))
    await asyncio.sleep(_HANDSHAKE_S)


def _drop_syns(listening: socket.socket) -> None:
    program = ctypes.create_string_buffer(b"".join(_INSTRUCTION.pack(*line) for line in _PROGRAM))
    # struct sock_fprog: number of instructions, and their address.
    fprog = struct.pack("HP", len(_PROGRAM), ctypes.addressof(program))
    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)


def _pending_connections(listening: socket.socket) -> int:
    info = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    unacked: int = struct.unpack_from("I", info, _UNACKED_OFFSET)[0]
    return unacked
