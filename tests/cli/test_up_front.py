"""Which API servers a cluster gets, and when the Python app serves alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import click
import openai
import pytest

from tailrace.cli.apply import _as_running
from tailrace.cli.up import up
from tailrace.cli.up_front import with_front
from tailrace.local.options import ClusterOptions, Engine, Front
from tailrace.local.plan import PartSpec, Tier
from tailrace.local.state import Identity, Part, RunState
from tailrace.service import vllm_rs
from tailrace.service.vllm_line import VllmLine
from tailrace.tenancy.file import locked_key_file
from tailrace.tenancy.keys import Tenant, TenantKeys
from tailrace.tiny import MODEL_PATH
from tests.harness.working_folder import WorkingFolder
from tests.waiting import WAIT_S

needs_vllm_rs = pytest.mark.skipif(vllm_rs.find() is None, reason="no vllm-rs")
OPTIONS = ClusterOptions(model=str(MODEL_PATH))


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_API_KEY", "VLLM_SERVER_DEV_MODE", "TAILRACE_API_KEYS"):
        monkeypatch.delenv(name, raising=False)


def chosen(options: ClusterOptions) -> tuple[ClusterOptions, list[str]]:
    """Return the options with what is chosen, and what the user is told."""
    told: list[str] = []
    with click.Context(up):
        return with_front(options, told.append), told


@needs_vllm_rs
def test_both_serve_behind_an_edge_by_default() -> None:
    options, told = chosen(OPTIONS)
    assert (options.front, options.edge, options.edge_arguments) == (Front.BOTH, "127.0.0.1:8000", ())
    assert not told
    exposed = ClusterOptions(model=str(MODEL_PATH), host="0.0.0.0", frontend_arguments=("--insecure",))
    assert chosen(exposed)[0].edge_arguments == ("--insecure",)


@needs_vllm_rs
@pytest.mark.parametrize(
    ("line", "arguments", "environment", "reason"),
    [
        (["--max-num-queued-reqs", "5"], (), {}, "--max-num-queued-reqs: not supported by vllm-rs"),
        (["--runner", "pooling"], (), {}, "vllm-rs does not serve pooling models"),
        (["--ssl-certfile", "a", "--ssl-keyfile", "b"], (), {}, "HTTPS"),
        (["--api-key", "a"], (), {}, "a key of vLLM's own"),
        ([], (), {"VLLM_API_KEY": "a"}, "a key of vLLM's own"),
        ([], (), {"VLLM_SERVER_DEV_MODE": "1"}, "VLLM_SERVER_DEV_MODE"),
        ([], ("--keep-answers", "60"), {}, "--keep-answers"),
        ([], ("--max-body-bytes", "2000000"), {}, "--max-body-bytes"),
    ],
)
def test_the_python_app_serves_alone_where_only_it_can(
    line: list[str], arguments: tuple[str, ...], environment: dict[str, str], reason: str
) -> None:
    options, told = chosen(
        ClusterOptions(
            model=str(MODEL_PATH),
            line=VllmLine.read(line),
            frontend_arguments=arguments,
            environment=environment,
        )
    )
    assert (options.front, options.edge) == (Front.PYTHON, "")
    assert len(told) == 1 and reason in told[0]


@needs_vllm_rs
def test_the_edge_asks_for_the_keys_that_front_ends_know(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    keys = TenantKeys().with_tenant(Tenant(name="a"))
    for given in (("--api-keys", str(file)), (f"--api-keys={file}",)):
        with locked_key_file(file) as replace:
            replace(keys)
        options, told = chosen(ClusterOptions(model=str(MODEL_PATH), frontend_arguments=given))
        assert options.front is Front.PYTHON
        assert "has no key of edges" in told[0]
        with locked_key_file(file) as replace:
            replace(keys.with_edge_key("now"))
        options, told = chosen(ClusterOptions(model=str(MODEL_PATH), frontend_arguments=given))
        assert (options.front, options.edge_arguments, told) == (Front.BOTH, given, [])


@needs_vllm_rs
def test_a_model_that_vllm_rs_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    options, told = chosen(ClusterOptions(model=str(tmp_path)))
    assert options.front is Front.PYTHON
    assert "tokenizer" in told[0]


def test_without_vllm_rs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(vllm_rs.PATH_VARIABLE, str(tmp_path / "none"))
    options, told = chosen(OPTIONS)
    assert options.front is Front.PYTHON
    assert "vllm-rs is not installed" in told[0]


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.cli.up_front.vllm_version", lambda: "")
    options, told = chosen(ClusterOptions(model=str(MODEL_PATH), engine=Engine.SIMULATED))
    assert (options.front, options.edge, told) == (Front.RUST, "", [])


def test_what_is_named_is_chosen() -> None:
    for front in (Front.PYTHON, Front.RUST):
        options, told = chosen(ClusterOptions(model=str(MODEL_PATH), front=front))
        assert (options.front, options.edge, told) == (front, "", [])


def test_a_running_cluster_keeps_its_api_servers_unless_its_file_names_others() -> None:
    def state(*fronts: str) -> RunState:
        identity = Identity(pid=1, start_ticks=0, boot_id="")
        specs = [
            PartSpec(f"frontend-{front}", Tier.FRONTEND, ["serve", "frontend", "--front", front], "")
            for front in fronts
        ]
        return RunState(parts=[Part(identity=identity, log="", spec=spec) for spec in specs])

    assert _as_running(OPTIONS, state("python")).front is Front.PYTHON
    assert _as_running(OPTIONS, state("rust")).front is Front.RUST
    assert _as_running(OPTIONS, state("rust", "python")).front is Front.BOTH
    named = ClusterOptions(model=str(MODEL_PATH), front=Front.RUST)
    assert _as_running(named, state("python")).front is Front.RUST


@pytest.fixture
def here(tmp_path: Path) -> Iterator[WorkingFolder]:
    place = WorkingFolder(tmp_path)
    yield place
    place.tailrace("down")


def pid(here: WorkingFolder, name: str) -> int:
    return next(part.identity.pid for part in here.state().parts if part.name == name)


@needs_vllm_rs
@pytest.mark.vllm
@pytest.mark.fleet
def test_the_python_app_starts_with_the_first_request_that_needs_it(here: WorkingFolder) -> None:
    result = here.tailrace("up", "--engine", "simulated", "--port", str(here.port))
    assert result.returncode == 0, result.stderr
    names = {part.name for part in here.state().parts}
    assert {"edge", "frontend", "frontend-python"} <= names
    api = openai.OpenAI(base_url=f"{here.state().http}/v1", api_key="none", timeout=2 * WAIT_S, max_retries=0)
    log = here.folder.logs / "frontend-python.log"
    assert len(api.completions.create(model="tiny", prompt="x", max_tokens=4).choices) == 1
    assert "the API server starts" not in log.read_text()
    # On a busy machine it takes longer than a request is held: a client tries again.
    patient = api.with_options(max_retries=100)
    assert len(patient.completions.create(model="tiny", prompt="x", max_tokens=4, n=2).choices) == 2
    assert "the API server starts" in log.read_text()
    assert api.responses.create(model="tiny", input="x", max_output_tokens=20).usage
    # No model of this kind: the Python app says so.
    with pytest.raises(openai.NotFoundError):
        api.embeddings.create(model="tiny", input="x")

    os.kill(pid(here, "frontend-python"), signal.SIGKILL)
    with pytest.raises(openai.InternalServerError) as refused:
        api.completions.create(model="tiny", prompt="x", max_tokens=4, n=2)
    assert refused.value.status_code == 503 and refused.value.response.headers["retry-after"]
    assert len(api.completions.create(model="tiny", prompt="x", max_tokens=4).choices) == 1
    assert "frontend-python: it has ended" in here.tailrace("doctor").stdout
    assert here.tailrace("restart", "frontend-python").returncode == 0
    assert "the API server starts" not in log.read_text()
