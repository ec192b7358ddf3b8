"""`make release`: what a release of the version in pyproject.toml consists of, in dist/release-VERSION.

The wheel, the lock files that the images install, an SBOM (CycloneDX) of each, the version's section of
CHANGELOG.md and what it says about upgrading, and SHA256SUMS. Refuses a tree with changes that are not
committed, and a version without a section in CHANGELOG.md.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from scripts.bundle.own import project_version, project_wheel

ROOT: Final = Path(__file__).resolve().parents[1]
_UPGRADING: Final = "### Upgrading"


class NotReleasable(Exception):
    """There is nothing to release; the message says what to do."""


def section_of(changelog: str, version: str) -> str:
    """Return the section of a version, `## VERSION` with or without a date. Raise NotReleasable."""
    for section in re.split(r"^(?=## )", changelog, flags=re.MULTILINE)[1:]:
        if section.split()[1] == version:
            return section
    raise NotReleasable(
        f"CHANGELOG.md has no section '## {version}': rename the one that begins '## Unreleased'"
    )


def upgrade_notes(section: str) -> str:
    """Return what a section says about upgrading. Raise NotReleasable if it says nothing."""
    for part in re.split(r"^(?=### )", section, flags=re.MULTILINE):
        if part.startswith(_UPGRADING):
            return part
    raise NotReleasable(f"the section in CHANGELOG.md has no part that begins '{_UPGRADING}'")


def check_clean(root: Path) -> None:
    """Raise NotReleasable unless the tree is as committed."""
    status = ["git", "-C", str(root), "status", "--porcelain"]
    changed = subprocess.run(status, check=True, capture_output=True, text=True).stdout.splitlines()
    if changed:
        raise NotReleasable(
            f"the tree has changes that are not committed; commit or remove: {changed[0][3:]}"
        )


def release(root: Path) -> Path:
    """Make the release; return its folder. Raise NotReleasable."""
    check_clean(root)
    version = project_version(root)
    section = section_of((root / "CHANGELOG.md").read_text(), version)
    notes = upgrade_notes(section)
    folder = root / "dist" / f"release-{version}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "CHANGELOG.md").write_text(section)
    (folder / "UPGRADING.md").write_text(notes)
    shutil.copytree(root / "deploy" / "locks", folder / "locks")
    project_wheel(root, folder)
    subprocess.run([root / "scripts" / "sbom.sh"], check=True, stdout=subprocess.DEVNULL)
    for sbom in sorted((root / "dist").glob("sbom-*.json")):
        sbom.rename(folder / sbom.name)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = (
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n" for path in files
    )
    (folder / "SHA256SUMS").write_text("".join(sums))
    return folder


def main() -> int:
    """Run the command; return its exit code."""
    try:
        folder = release(ROOT)
    except NotReleasable as error:
        print(f"no release: {error}", file=sys.stderr)
        return 1
    print(folder.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
