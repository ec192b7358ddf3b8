"""How soon gRPC notices that the other end of a connection does not answer."""

from __future__ import annotations


def ping_options(every_s: float, answer_s: float) -> tuple[tuple[str, int], ...]:
    """Return options of a channel or server that pings the other end `every_s` seconds after the last data,
    and ends the connection unless it answers within `answer_s` seconds.

    So calls end when the other process hangs, although its kernel acknowledges what is sent.
    """
    return (
        ("grpc.keepalive_time_ms", round(every_s * 1e3)),
        # For how long the kernel may have sent data unacknowledged (TCP_USER_TIMEOUT).
        ("grpc.keepalive_timeout_ms", round(answer_s * 1e3)),
        # gRPC 1.85 waits for the answer to a ping for this long, a minute by default, whatever the option
        # above says.
        ("grpc.http2.ping_timeout_ms", round(answer_s * 1e3)),
        ("grpc.http2.max_pings_without_data", 0),
    )
