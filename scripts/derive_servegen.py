"""Derive simulator/workloads/data/servegen_r1.json from ServeGen's published DeepSeek-R1 distributions.

    python scripts/derive_servegen.py DIR > simulator/workloads/data/servegen_r1.json

DIR holds `chunk-<client>-dataset.json` and `chunk-<client>-trace.csv` of ServeGen's
`data/reason/deepseek-r1`. For every client and every six-hour window ServeGen gives how many requests there
were and histograms of prompt length, output length and the share of the output that is reasoning. What is
kept: quantiles of the three for the 24 largest (client, window) pairs, and of all others in six groups by
their median output, each with its share of all requests.
"""

from __future__ import annotations

import ast
import csv
import json
import sys
from collections import defaultdict
from pathlib import Path

WINDOW_S = 21_600
TRACE_STEP_S = 600
OWN = 24
GROUPS = 6
SHARES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0)
# Tables are of positive values; a share of zero is one token of reasoning in a thousand.
LEAST_REASONING = 0.001

Histogram = dict[float, float]
FIELDS = {
    "prompt_tokens": "input_tokens",
    "output_tokens": "output_tokens",
    "reasoning_share": "reason_ratio",
}


def cells(folder: Path) -> list[tuple[float, dict[str, Histogram]]]:
    """(requests, histograms by field) of every client and window that had any."""
    found = []
    for path in sorted(folder.glob("chunk-*-dataset.json")):
        trace = path.with_name(path.name.replace("-dataset.json", "-trace.csv"))
        requests: dict[int, float] = defaultdict(float)
        with trace.open(newline="") as lines:
            for row in csv.reader(lines):
                requests[int(float(row[0])) // WINDOW_S * WINDOW_S] += float(row[1]) * TRACE_STEP_S
        for window, fields in json.loads(path.read_text()).items():
            histograms = {
                ours: ast.literal_eval(fields[theirs]) for ours, theirs in FIELDS.items() if fields[theirs]
            }
            if requests[int(window)] > 0 and len(histograms) == len(FIELDS) and all(histograms.values()):
                found.append((requests[int(window)], histograms))
    return sorted(found, key=lambda cell: -cell[0])


def quantiles(histogram: Histogram) -> list[float]:
    total, reached, left = sum(histogram.values()), 0.0, list(SHARES)
    values: list[float] = []
    for value in sorted(histogram):
        if histogram[value] == 0.0:
            continue
        reached += histogram[value] / total
        while left and (reached >= left[0] - 1e-9):
            values.append(max(float(value), LEAST_REASONING))
            left.pop(0)
    return [round(value, 3) for value in values]


def pooled(parts: list[tuple[float, dict[str, Histogram]]]) -> tuple[float, dict[str, Histogram]]:
    total = sum(requests for requests, _ in parts)
    fields: dict[str, Histogram] = {name: defaultdict(float) for name in FIELDS}
    for requests, histograms in parts:
        for name, histogram in histograms.items():
            mass = sum(histogram.values())
            for value, share in histogram.items():
                fields[name][value] += requests / total * share / mass
    return total, fields


def main() -> None:
    everything = cells(Path(sys.argv[1]))
    rest = sorted(everything[OWN:], key=lambda cell: quantiles(cell[1]["output_tokens"])[SHARES.index(0.5)])
    half = sum(requests for requests, _ in rest) / GROUPS
    groups: list[list[tuple[float, dict[str, Histogram]]]] = [[] for _ in range(GROUPS)]
    passed = 0.0
    for cell in rest:
        groups[min(int(passed / half), GROUPS - 1)].append(cell)
        passed += cell[0]
    components = everything[:OWN] + [pooled(group) for group in groups if group]
    total = sum(requests for requests, _ in components)
    json.dump(
        {
            "source": "ServeGen (Xiang et al., arXiv:2505.09999), data/reason/deepseek-r1; "
            "https://github.com/alibaba/ServeGen; derived by scripts/derive_servegen.py",
            "licence": "The data that these quantiles are derived from is licensed under Apache-2.0.",
            "shares": SHARES,
            "components": [
                {"weight": round(requests / total, 6)}
                | {name: quantiles(histogram) for name, histogram in histograms.items()}
                for requests, histograms in components
            ],
        },
        sys.stdout,
        indent=None,
        separators=(",", ":"),
    )
    print()


main()
