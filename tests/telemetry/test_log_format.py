"""What a line of the log looks like."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from click.testing import CliRunner

from tailrace.cli.main import main
from tests.waiting import WAIT_S

# A service that logs a line, and ends by a mistake.
_SERVICE = """
import logging
import json, logging.config, os, warnings
from tailrace.service.runtime import run_service
from tailrace.telemetry.log_format import log_as

async def main(shutdown):
    logging.getLogger("a.b").warning("%s", 'two\\nlines, "quoted", \\u00e9 \\ud800')
    warnings.warn("a library")
    configuration = os.environ.get("VLLM_LOGGING_CONFIG_PATH", "")
    if configuration:
        logging.config.dictConfig(json.load(open(configuration)))
    for name in ("vllm.some.module", "uvicorn.access", "uvicorn.error"):
        logging.getLogger(name).info("theirs", extra={"request_id": "r-1"})
    raise LookupError("no such thing")

log_as("monitor", "m0")
run_service(main)
"""


def log_of_a_service(monkeypatch: pytest.MonkeyPatch, chosen: str) -> list[str]:
    """Return the lines that the service writes in a format."""
    monkeypatch.setenv("TAILRACE_LOG_FORMAT", chosen)
    run = subprocess.run([sys.executable, "-c", _SERVICE], capture_output=True, text=True, timeout=WAIT_S)
    assert run.returncode == 1
    return run.stderr.splitlines()


def test_each_line_is_one_json_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_CONFIG_PATH", raising=False)
    said, warned, *theirs, failed = (json.loads(line) for line in log_of_a_service(monkeypatch, "json"))
    assert datetime.fromisoformat(said.pop("ts")).tzinfo is UTC
    assert said == {
        "level": "WARNING",
        "logger": "a.b",
        "message": 'two\nlines, "quoted", \u00e9 \ud800',
        "service": "monitor",
        "id": "m0",
    }
    assert (warned["logger"], "a library" in warned["message"]) == ("py.warnings", True)
    for line, logger in zip(theirs, ("vllm.some.module", "uvicorn.access", "uvicorn.error"), strict=True):
        assert (line["logger"], line["message"], line["request_id"]) == (logger, "theirs", "r-1")
        assert (line["service"], line["id"]) == ("monitor", "m0")
    assert failed["level"] == "ERROR"
    assert failed["exception"].endswith("LookupError: no such thing")


@pytest.mark.parametrize("chosen", ["", "text"])
def test_text_is_the_default(monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    lines = log_of_a_service(monkeypatch, chosen)
    assert "ERROR tailrace.service.runtime: failed" in "\n".join(lines)
    assert lines[-1] == "LookupError: no such thing"


def test_an_invalid_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_LOG_FORMAT", "xml")
    result = CliRunner().invoke(main, ["serve", "monitor"])
    assert result.exit_code == 2
    assert (
        "'--log-format' (env var: 'TAILRACE_LOG_FORMAT'): 'xml' is not one of 'text', 'json'" in result.output
    )
