"""Command lines of coding agents: each calls one tool and ends."""

from __future__ import annotations

import json
from typing import Any, Final

from tests.clients.client import Client, ClientError, Run, execute
from tests.clients.rows import Outcome
from tests.harness.servers import MODEL

_PROMPT: Final = "Run the tool."
_CONTEXT: Final = 60_000
_OUTPUT_TOKENS: Final = 2_000


def run_codex(client: Client, run: Run) -> Outcome:
    """Run `codex exec`, which uses `/v1/responses`."""
    provider = f'{{name="fleet",base_url="{run.url}/v1",wire_api="responses",env_key="FLEET_KEY"}}'
    command = [client.program("codex"), "exec", "--json", "--skip-git-repo-check", "-m", MODEL]
    command += ["-s", "danger-full-access", "-c", 'model_provider="fleet"']
    command += ["-c", f"model_providers.fleet={provider}", "-c", f"model_context_window={_CONTEXT}", _PROMPT]
    home = run.folder / "home"
    home.mkdir()
    output = execute(command, folder=run.folder, env={"CODEX_HOME": str(home), "FLEET_KEY": "none"})
    items = [event["item"] for event in _events(output) if event["type"] == "item.completed"]
    kept = ("type", "text", "command", "aggregated_output", "exit_code", "message")
    steps = [{key: item[key] for key in kept if key in item} for item in items]
    # One request for the call, and one for the last answer.
    return _outcome(steps, [item["type"] for item in items].count("agent_message"))


def run_claude_code(client: Client, run: Run) -> Outcome:
    """Run `claude -p`, which uses `/v1/messages`."""
    command = [client.program("claude"), "-p", _PROMPT, "--output-format", "stream-json", "--verbose"]
    command += ["--allowedTools", "Bash", "--model", MODEL]
    environment = {
        "HOME": str(run.folder),
        "ANTHROPIC_BASE_URL": run.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(_OUTPUT_TOKENS),
    }
    output = execute(command, folder=run.folder, env=environment)
    steps: list[Any] = []
    requests = set()
    kept = ("type", "text", "name", "input", "content", "is_error")
    for event in _events(output):
        if event["type"] == "assistant":
            requests.add(event["message"]["id"])
        if event["type"] in ("assistant", "user"):
            content = event["message"]["content"]
            steps += [{key: part[key] for key in kept if key in part} for part in content]
        elif event["type"] == "result":
            steps.append({"type": "result", "subtype": event["subtype"], "text": event.get("result")})
    return _outcome(steps, len(requests))


def run_opencode(client: Client, run: Run) -> Outcome:
    """Run `opencode run`, which uses `/v1/chat/completions`."""
    model = {"name": MODEL, "limit": {"context": _CONTEXT, "output": _OUTPUT_TOKENS}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "fleet",
        "options": {"baseURL": f"{run.url}/v1", "apiKey": "none"},
        "models": {MODEL: model},
    }
    config = {"provider": {"fleet": provider}, "permission": {"bash": "allow"}, "autoupdate": False}
    (run.folder / "opencode.json").write_text(json.dumps(config))
    command = [client.program("opencode"), "run", "--format", "json", "--model", f"fleet/{MODEL}", _PROMPT]
    environment = {"HOME": str(run.folder), "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    output = execute(command, folder=run.folder, env=environment)
    steps: list[Any] = []
    requests = 0
    for event in _events(output):
        part = event.get("part", {})
        requests += event["type"] == "step_finish"
        if event["type"] == "text":
            steps.append({"type": "text", "text": part["text"]})
        elif event["type"] == "tool_use":
            state = part["state"]
            steps.append({"type": "tool", "name": part["tool"], "input": state["input"]})
            steps.append({"type": "result", "status": state["status"], "output": state.get("output")})
        elif event["type"] == "error":
            steps.append({"type": "error", "text": json.dumps(event.get("error"))})
    return _outcome(steps, requests)


def _events(output: str) -> list[dict[str, Any]]:
    """Return the lines of an output that are JSON objects."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def _outcome(steps: list[Any], requests: int) -> Outcome:
    outputs = [str(step.get(key)) for step in steps for key in ("output", "aggregated_output", "content")]
    if not any("ran" in output for output in outputs):
        raise ClientError(f"no tool ran: {json.dumps(steps)[-1000:]}")
    return Outcome(requests, {}, {f"step {number}": step for number, step in enumerate(steps)})
