"""Exit with 0 if the pinned build of vLLM ("cpu" or "gpu") is in this environment, else with 1."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from vllm_pin import distribution, pinned_version


def main() -> None:
    """The one argument is the name of the extra."""
    extra = sys.argv[1]
    try:
        installed = version(distribution(extra))
    except PackageNotFoundError:
        sys.exit(1)
    sys.exit(installed != pinned_version(extra))


if __name__ == "__main__":
    main()
