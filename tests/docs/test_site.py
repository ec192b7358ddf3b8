"""The site builds without warnings, and there are no broken links."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
# MkDocs checks the pages of the site.
OTHERS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "deploy/README.md"]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "tutorial" / "index.html").exists()


@pytest.mark.parametrize("name", OTHERS)
def test_links_are_not_broken(name: str) -> None:
    page = ROOT / name
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []
