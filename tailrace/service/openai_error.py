"""OpenAI's error object, as vLLM's API servers answer it."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Final

NO_WEB_SOCKETS: Final = "WebSockets are not served: a worker takes complete prompts alone."
"""Why a request for one is refused. vLLM's route for them, `/v1/realtime`, sends a prompt in parts."""


def error_body(status: HTTPStatus, kind: str, message: str, param: str | None = None) -> bytes:
    """Return the object of type `kind` for this status. `param`: the field at fault."""
    error = {"message": message, "type": kind, "param": param, "code": status.value}
    return json.dumps({"error": error}).encode()
