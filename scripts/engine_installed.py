"""Exit with 0 if a build of vLLM ("cpu" or "gpu") is in this environment: the pinned version or a given one.

Else with 1.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from vllm_pin import distribution, pinned_version


def main() -> None:
    """Arguments: the name of the extra, and a version if it is not the pinned one."""
    extra, *given = sys.argv[1:]
    try:
        installed = version(distribution(extra))
    except PackageNotFoundError:
        sys.exit(1)
    sys.exit(installed != (given[0] if given else pinned_version(extra)))


if __name__ == "__main__":
    main()
