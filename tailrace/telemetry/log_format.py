"""The format of a process's log: text, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

VARIABLE: Final = "TAILRACE_LOG_FORMAT"
FORMATS: Final = ("text", "json")
_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Who logs, for this process and those that it starts (vLLM's API server, an engine's ranks).
_SERVICE: Final = "TAILRACE_LOG_SERVICE"
_MEMBER_ID: Final = "TAILRACE_LOG_ID"
# By which vLLM and uvicorn log as we do, in whichever process.
_VLLM_CONFIG: Final = "VLLM_LOGGING_CONFIG_PATH"
_JSON_LOGGING: Final = Path(__file__).with_name("json_logging.json")


class JsonFormatter(logging.Formatter):
    """Format each record as a JSON object in one line."""

    def __init__(self) -> None:
        super().__init__()
        self._service = os.environ.get(_SERVICE, "")
        self._member_id = os.environ.get(_MEMBER_ID, "")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; see logging.Formatter."""
        written = datetime.fromtimestamp(record.created, UTC)
        line = {
            "ts": written.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "service": self._service,
            "id": self._member_id,
        }
        # In the access log; see frontend_svc/api_server/http_protocol.py.
        if request_id := getattr(record, "request_id", ""):
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def start_logging(level: str) -> None:
    """Log to stderr in the format that the environment chooses, in this process and, if that is JSON, in vLLM
    here and in processes that this one starts. Raise ValueError if the environment names no format."""
    chosen = os.environ.get(VARIABLE, "") or FORMATS[0]
    if chosen not in FORMATS:
        raise ValueError(f"{VARIABLE}: {chosen[:40]!r} is none of {', '.join(FORMATS)}")
    is_json = chosen == "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if is_json else logging.Formatter(_TEXT))
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(is_json)
    if is_json and os.environ.get("VLLM_CONFIGURE_LOGGING", "1") != "0":
        os.environ.setdefault(_VLLM_CONFIG, str(_JSON_LOGGING))


def vllm_handler() -> logging.Handler:
    """Return the handler that json_logging.json gives to vLLM and uvicorn; set vLLM's own level."""
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    return handler


def log_as(service: str, member_id: str) -> None:
    """Say in each line of JSON who logs it. Call it before `start_logging`."""
    os.environ[_SERVICE], os.environ[_MEMBER_ID] = service, member_id
