"""Run Helm on a chart, in a process of its own.

`python -m tests.fleet.helm CHART [VALUES]` prints JSON with the errors of `helm lint`, and the objects of
`helm template` by file, or the error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import helm_python
import yaml


def main(chart: str, values: str = "") -> None:
    """Print them."""
    given = yaml.safe_load(Path(values).read_text()) if values else {}
    lint = helm_python.lint(chart)
    with helm_python.Chart.load(chart) as loaded:
        try:
            texts = loaded.render(given, name="tailrace", namespace="elsewhere")
        except helm_python.HelmError as error:
            print(json.dumps({"error": str(error)}))
            return
    objects = {
        Path(name).name: [each for each in yaml.safe_load_all(text) if each] for name, text in texts.items()
    }
    print(json.dumps({"lint": lint["errors"], "objects": objects}))


if __name__ == "__main__":
    main(*sys.argv[1:])
