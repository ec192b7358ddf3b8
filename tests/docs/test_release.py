"""What `make release` refuses, and what it takes from the changelog."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.release import NotReleasable, check_clean, section_of, upgrade_notes

CHANGELOG = """# Changelog

## Unreleased (0.3.0)

- Later.

## 0.2.0 (2026-01-01)

- New.

### Upgrading from an earlier revision

- Restart.

## 0.1.0

- First.
"""


def test_a_version_has_its_own_section() -> None:
    section = section_of(CHANGELOG, "0.2.0")
    assert "- New." in section and "First" not in section and "Later" not in section
    assert upgrade_notes(section).split("\n", 1)[1].strip() == "- Restart."


def test_a_version_without_a_section_or_notes_is_refused() -> None:
    with pytest.raises(NotReleasable, match=r"no section '## 0\.3\.0'"):
        section_of(CHANGELOG, "0.3.0")
    with pytest.raises(NotReleasable, match="### Upgrading"):
        upgrade_notes(section_of(CHANGELOG, "0.1.0"))


def test_a_dirty_tree_is_refused(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    check_clean(tmp_path)
    (tmp_path / "new.txt").write_text("")
    with pytest.raises(NotReleasable, match=r"new\.txt"):
        check_clean(tmp_path)
