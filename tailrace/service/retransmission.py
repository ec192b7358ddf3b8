"""Let a TCP connection continue soon after a network outage, and notice a peer that has vanished.

While nothing is acknowledged, the kernel doubles the interval between retransmissions, from about 0.2 s up to
two minutes (RFC 6298, section 5.5). After an outage, a connection with unacknowledged data therefore stays
silent for up to as long again as the outage lasted. Linux 6.15 and later can bound the interval of a socket.
"""

from __future__ import annotations

import errno
import socket
from typing import Final

# Linux, include/uapi/linux/tcp.h.
_TCP_RTO_MAX_MS: Final = 44
# The answer of a kernel without the option.
_UNSUPPORTED: Final = frozenset({errno.ENOPROTOOPT, errno.EOPNOTSUPP})


def probe_when_idle(sock: socket.socket, after_s: int, every_s: int, probes: int) -> None:
    """Have the kernel probe the other end of an idle connection, after `after_s` seconds and then every
    `every_s` seconds, and end the connection once `probes` in a row are not answered.

    So a peer whose host or network has vanished is noticed after `after_s + every_s * probes` seconds. One
    that only does not read still answers.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, after_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)


def bound_retransmission(sock: socket.socket, interval_s: float, give_up_s: float) -> bool:
    """Retransmit at least every `interval_s` seconds; give up after `give_up_s` without progress.

    Connections inherit both from the listening socket. `interval_s` is at least 1, the minimum of the kernel.
    `give_up_s` also bounds for how long the other end may leave its receive window closed.

    Return False if the kernel cannot bound the interval; then only `give_up_s` applies. Raise OSError if the
    socket is not a TCP socket or is closed.
    """
    # The kernel's own limit is a number of retransmissions: with short intervals it would give up in seconds.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(give_up_s * 1e3))
    try:
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, round(interval_s * 1e3))
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return True
