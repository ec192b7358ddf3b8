"""The package of docs/adding-a-policy.md is installed, tested and run as the page describes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import WAIT_S

pytestmark = pytest.mark.fleet

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "my_policy"
PAGE = (ROOT / "docs" / "adding-a-policy.md").read_text()


def run(*command: str, folder: Path, installed: Path | None = None) -> str:
    # With this checkout of tailrace, which need not be the installed one.
    path = {"PYTHONPATH": f"{installed}{os.pathsep}{ROOT}"} if installed else {}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | path,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the package, installed in its folder `site`."""
    folder = tmp_path_factory.mktemp("my_policy") / "copy"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("*.egg-info", "build", "__pycache__"))
    pip = ("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--disable-pip-version-check", "--target", str(folder / "site"), ".", folder=folder)
    return folder


def test_the_page_shows_the_current_files() -> None:
    shown = dict(re.findall(r"^`examples/my_policy/(\S+)`:\n\n```\w+\n(.*?)```$", PAGE, flags=re.S | re.M))
    assert shown.keys() == {"my_policy/headroom.py", "pyproject.toml"}
    assert shown["my_policy/headroom.py"] == (PACKAGE / "my_policy/headroom.py").read_text()
    # An excerpt.
    assert shown["pyproject.toml"] in (PACKAGE / "pyproject.toml").read_text()


def test_files_named_on_the_page_exist() -> None:
    named = set(re.findall(r"`examples/my_policy/(\S+)`", PAGE))
    assert {"my_policy/divided.py", "test_headroom.py", "try_it.py"} <= named
    assert all((PACKAGE / name).is_file() for name in named)


def test_the_tests_of_the_package_pass(folder: Path) -> None:
    out = run("-m", "pytest", "-q", "test_headroom.py", folder=folder, installed=folder / "site")
    assert "4 passed" in out


def test_the_policy_is_found_by_name(folder: Path) -> None:
    _, *lines = run("try_it.py", folder=folder, installed=folder / "site").splitlines()
    assert [line.split()[0] for line in lines] == ["round_robin", "least_loaded", "headroom"]


CLI = ("-c", "from tailrace.cli.main import main; main()")


@pytest.mark.slow
def test_the_commands_on_the_page_run(folder: Path) -> None:
    commands = re.findall(r"^    tailrace (compare .*)$", PAGE.replace("\\\n", " "), flags=re.M)
    fewer = ("--count", "40", "--seeds", "1", "--processes", "1", "-o", "csv")
    outs = [run(*CLI, *shlex.split(c), *fewer, folder=folder, installed=folder / "site") for c in commands]
    assert len(outs) == 2
    assert all(f",{name}," in outs[0] for name in ("round_robin", "least_loaded", "headroom"))
    assert "headroom" in (folder / "headroom.html").read_text()
    assert all(f",{name}," in outs[1] for name in ("divided", "divided prefill_share=0.5", "headroom"))


def test_the_class_can_be_named_without_an_entry_point(folder: Path) -> None:
    options = ("--rate", "4", "--count", "20", "-o", "csv")
    named = ("simulate", "my_policy.headroom:Headroom", "r1")
    out = run(*CLI, *named, *options, folder=folder, installed=PACKAGE)
    assert "my_policy.headroom:Headroom" in out


def test_a_package_can_declare_a_complete_setup(folder: Path) -> None:
    code = (
        "from simulator.cluster import ClusterSpec\n"
        "from simulator.setups import setup_for\n"
        "from tailrace.profiles import load_profile\n"
        "from scheduler_svc.admin.listing import policy_infos\n"
        "from tailrace.policy.registry import all_parameters, load\n"
        "from tailrace.records import PolicyRecord\n"
        "from worker_agent.intra_switch import order_of_policy\n"
        "spec = ClusterSpec.uniform(8, load_profile('r1-distill-qwen-32b-h100'))\n"
        "for name in ('divided', 'divided+fcfs prefill_share=0.5'):\n"
        "    setup = setup_for(name)\n"
        "    pools = [i.pool.value for i in setup.apply(spec).instances]\n"
        "    order = order_of_policy(PolicyRecord(name=name))[0]\n"
        "    print(name, pools.count('prefill'), setup.intra_name, order,\n"
        "          setup.migration.when_full.value, all_parameters(name, {}))\n"
        "print(load('divided prefill_share=0.5', parameters={'prefill_share': '0.75'}).prefill_share)\n"
        "active = PolicyRecord(name='divided+fcfs')\n"
        "print([(i.name, i.batch_order) for i in policy_infos(active, {}) if i.active])\n"
    )
    lines = run("-c", code, folder=folder, installed=folder / "site").splitlines()
    assert lines[0] == (
        "divided 2 shortest_prompt shortest_prompt refuse {'prefill_share': 0.25, 'moves': True}"
    )
    assert lines[1] == (
        "divided+fcfs prefill_share=0.5 4 fcfs fcfs refuse "
        "{'prefill_share': 0.5, 'moves': True, 'watermark': 0.01, 'pass_over': 0.0}"
    )
    assert lines[2] == "0.75"
    assert lines[3] == "[('divided+fcfs', 'fcfs')]"


def test_parameters_are_accepted_on_the_command_line(folder: Path) -> None:
    options = ("--rate", "4", "--count", "40", "--set", "prefill_share=0.3", "-o", "csv")
    out = run(*CLI, "simulate", "divided", "r1", *options, folder=folder, installed=folder / "site")
    assert "divided" in out
