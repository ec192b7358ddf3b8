"""The package of docs/adding-a-policy.md: installed, tested and tried as the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.fleet

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "my_policy"
PAGE = (ROOT / "docs" / "adding-a-policy.md").read_text()


def run(*command: str, folder: Path, installed: Path | None = None) -> str:
    # Beside the tailrace that is tested, which need not be the one that is installed.
    path = {"PYTHONPATH": f"{installed}{os.pathsep}{ROOT}"} if installed else {}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, with the package installed in `site` beside it."""
    folder = tmp_path_factory.mktemp("my_policy") / "copy"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("*.egg-info", "build", "__pycache__"))
    pip = ("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--disable-pip-version-check", "--target", str(folder / "site"), ".", folder=folder)
    return folder


def test_the_page_shows_the_files_as_they_are() -> None:
    shown = dict(re.findall(r"^`examples/my_policy/(\S+)`:\n\n```\w+\n(.*?)```$", PAGE, flags=re.S | re.M))
    assert shown.keys() == {"my_policy/headroom.py", "test_headroom.py", "pyproject.toml", "try_it.py"}
    for name, text in shown.items():
        assert text == (PACKAGE / name).read_text(), name


def test_its_own_tests_pass(folder: Path) -> None:
    out = run("-m", "pytest", "-q", "test_headroom.py", folder=folder, installed=folder / "site")
    assert "4 passed" in out


def test_it_is_known_by_name_and_can_be_tried(folder: Path) -> None:
    header, *lines = run("try_it.py", folder=folder, installed=folder / "site").splitlines()
    assert header in PAGE
    assert [line.split()[0] for line in lines] == ["round_robin", "least_loaded", "headroom"]


CLI = ("-c", "from tailrace.cli.main import main; main()")


def test_the_command_of_the_page_compares_it(folder: Path) -> None:
    (command,) = re.findall(r"^    tailrace (compare .*)$", PAGE.replace("\\\n", " "), flags=re.M)
    fewer = ("--count", "40", "--seeds", "1", "--processes", "1", "-o", "csv")
    out = run(*CLI, *command.split(), *fewer, folder=folder, installed=folder / "site")
    assert all(f",{name}," in out for name in ("round_robin", "least_loaded", "headroom"))
    assert "headroom" in (folder / "headroom.html").read_text()


def test_the_class_can_be_named_without_an_entry_point(folder: Path) -> None:
    options = ("--rate", "4", "--count", "20", "-o", "csv")
    named = ("simulate", "my_policy.headroom:Headroom", "r1")
    out = run(*CLI, *named, *options, folder=folder, installed=PACKAGE)
    assert "my_policy.headroom:Headroom" in out
