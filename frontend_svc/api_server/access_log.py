"""The access log of vLLM's Python app, with the id by which the fleet knows each request."""

from __future__ import annotations

import logging

from uvicorn.config import LOGGING_CONFIG

from frontend_svc.api_server.request_limits import account_of_task


class RequestIds(logging.Filter):
    """Give each line of the access log the id of its request: that of its first one in the engine.

    uvicorn logs a response when it begins, in the request's own context.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Set `request_id`; see logging.Filter."""
        account = account_of_task.get()
        record.request_id = "" if account is None else account.request_id
        return True


def show_request_ids() -> None:
    """Show the ids from now on, in text and in JSON, unless vLLM's arguments give a log configuration."""
    logging.getLogger("uvicorn.access").addFilter(RequestIds())
    access = LOGGING_CONFIG["formatters"]["access"]
    access["fmt"] += " %(request_id)s"
