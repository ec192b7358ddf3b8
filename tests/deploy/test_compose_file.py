"""The compose file conforms to the Compose Specification and matches this repository."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

from tests.deploy.compose import DEPLOY, load_compose
from tests.deploy.services import longest_s, parse_serve

ROOT = DEPLOY.parent
SERVICES = load_compose()["services"]
TAILRACE_SERVICES = (
    "scheduler",
    "scheduler-standby",
    "monitor",
    "migration",
    "worker-0",
    "worker-1",
    "frontend",
)


def _schema() -> dict[str, object]:
    packaged = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema = json.loads(packaged.read_text())
    assert isinstance(schema, dict)
    return schema


@pytest.mark.parametrize(
    "name",
    ["docker-compose.yml", "docker-compose.gpu.yml", "docker-compose.keys.yml", "docker-compose.rdma.yml"],
)
def test_compose_schema(name: str) -> None:
    # It compiles dozens of grammars when it is imported.
    import jsonschema

    jsonschema.validate(load_compose(name), _schema())


def test_the_schema_detects_an_error() -> None:
    import jsonschema

    broken = {**load_compose(), "services": {"etcd": {"imagine": "x"}}}
    with pytest.raises(jsonschema.ValidationError, match="imagine"):
        jsonschema.validate(broken, _schema())


def test_all_services_of_the_cluster_are_defined() -> None:
    assert set(SERVICES) == {"etcd", *TAILRACE_SERVICES, "otel-collector", "jaeger", "prometheus", "grafana"}


@pytest.mark.parametrize("name", TAILRACE_SERVICES)
def test_commands_parse(name: str) -> None:
    about = SERVICES[name]
    assert about["command"][:2] == ["tailrace", "serve"]
    parse_serve(about["command"][2:])
    assert about["environment"]["TAILRACE_ADVERTISE"] == name
    assert f"--id={name}" in about["command"]


def test_dependencies_on_health_have_a_health_check() -> None:
    for name, about in SERVICES.items():
        for other, how in about.get("depends_on", {}).items():
            healthy = how["condition"] == "service_healthy"
            assert not healthy or "healthcheck" in SERVICES[other], f"{name} waits for {other}"


def test_a_front_end_does_not_wait_for_models_to_load() -> None:
    """A large model takes longer than any start period, so the front end itself waits for instances."""
    depends = SERVICES["frontend"]["depends_on"]
    assert depends["worker-0"]["condition"] == "service_started"
    for name in ("worker-0", "worker-1", "frontend"):
        assert SERVICES[name]["healthcheck"]["start_period"] == "1h"


def test_no_reasoning_parser_is_assumed() -> None:
    for name in ("worker-0", "worker-1", "frontend"):
        assert "--reasoning-parser=" in SERVICES[name]["command"]


def test_services_are_confined() -> None:
    for name, about in SERVICES.items():
        assert about["read_only"] and about["cap_drop"] == ["ALL"], name
        assert about["security_opt"] == ["no-new-privileges:true"], name
        assert about["mem_limit"] and about["pids_limit"], name


def test_secrets_are_files() -> None:
    for name, about in SERVICES.items():
        for variable in about.get("environment", {}):
            secret = any(word in variable for word in ("TOKEN", "PASSWORD", "SECRET", "API_KEY"))
            assert not secret or variable.endswith(("_PATH", "_FILE")), f"{name}: {variable}"


def test_ports_are_on_loopback_unless_keys_are_required() -> None:
    published = [port for about in SERVICES.values() for port in about.get("ports", [])]
    assert published and all(port.startswith("127.0.0.1:") for port in published)
    with_keys = load_compose("docker-compose.keys.yml")["services"]
    assert set(with_keys) == {"frontend"} and with_keys["frontend"]["ports"] == ["8080:8000"]
    file = with_keys["frontend"]["environment"]["TAILRACE_API_KEYS"]
    (volume,) = with_keys["frontend"]["volumes"]
    assert volume.split(":")[1] == str(Path(file).parent)


def test_images_install_only_hashed_packages() -> None:
    """Except vLLM's CPU build, which has no lock."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip install [^&;]+", text)
    unhashed = [each for each in installs if "--require-hashes" not in each and "/wheels/*.whl" not in each]
    assert len(unhashed) == 1 and "TORCH_INDEX" in unhashed[0]
    assert "pip wheel --no-deps --no-build-isolation" in text and "ARG REQUIRE_DIGEST" in text


@pytest.mark.parametrize("name", ["scheduler", "scheduler-standby", "worker-0", "worker-1", "frontend"])
def test_services_accept_further_arguments(name: str) -> None:
    kind = SERVICES[name]["command"][2].upper()
    assert "TAILRACE_SERVE_ARGS" in SERVICES[name]["environment"]
    assert (
        f'TAILRACE_SERVE_ARGS: "${{TAILRACE_{kind}_ARGS:-}}"' in (DEPLOY / "docker-compose.yml").read_text()
    )


@pytest.mark.parametrize("name", TAILRACE_SERVICES)
def test_a_container_is_not_killed_while_it_drains(name: str) -> None:
    given = SERVICES[name]["stop_grace_period"]
    assert float(given.removesuffix("s")) > longest_s(name)


def test_volumes_and_mounted_files_exist() -> None:
    named = load_compose()["volumes"]
    assert isinstance(named, dict)
    for about in SERVICES.values():
        for volume in about.get("volumes", []):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in named, volume


def test_images_are_pinned() -> None:
    for about in SERVICES.values():
        assert re.search(r":v?\d+\.\d+\.\d+$", about["image"]), about["image"]


def test_builds_name_stages_and_files_that_exist() -> None:
    stages = re.findall(r"^FROM \S+ AS (\w+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    for name in TAILRACE_SERVICES:
        build = SERVICES[name]["build"]
        assert (DEPLOY / build["context"]).resolve() == ROOT
        assert ROOT / build["dockerfile"] == DEPLOY / "Dockerfile"
        assert build["target"] in stages


def test_files_copied_by_the_dockerfile_exist_and_are_not_ignored() -> None:
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignore if line.startswith("!")}
    copied = {
        Path(source)
        for line in re.findall(r"^COPY (?!--)(.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
        for source in line.split()[:-1]
    }
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(source.is_relative_to(path) for path in kept), source


def test_images_do_not_run_as_root() -> None:
    final = re.split(r"^FROM ", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    for stage in ("control", "engine"):
        (text,) = [part for part in final if part.split("\n")[0].endswith(f" AS {stage}")]
        assert "\nUSER tailrace\n" in text


def test_every_package_is_in_the_image() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    for package in sorted(
        path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"
    ):
        if package not in ("benchmarks", "examples", "experiments"):
            assert f"COPY {package} {package}\n" in text
