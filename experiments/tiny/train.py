"""Train the tiny model from a seed: ``python -m experiments.tiny.train --seed 0 --out DIR``.

The run is determined by the seed, the number of threads and torch's version; it needs no data, no network and
no GPU.
"""

import argparse
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from experiments.tiny.curriculum import Example, whole_example, window_example
from experiments.tiny.network import Network, Shape
from experiments.tiny.tokens import END_OF_TEXT, IM_END, write_tokenizer

WINDOW_TOKENS: Final = 5_000
WHOLE_TOKENS: Final = 5_000
"""Tokens of a step, padding included."""

WANTED_MARGIN: Final = 14.0
"""How far the right token's logit should lie above every other, so that rounding never decides."""

_IGNORED: Final = -100


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of equal length; ``targets`` holds the token to predict, or ``_IGNORED``."""

    ids: Tensor
    positions: Tensor
    targets: Tensor


def batches(draw: random.Random, make: Callable[[random.Random], Example], tokens: int) -> Iterator[Batch]:
    """Yield batches of about ``tokens`` tokens, of rows of similar length, in random order."""
    while True:
        pool = sorted((make(draw) for _ in range(128)), key=lambda example: len(example.ids))
        rows: list[list[Example]] = [[]]
        for example in pool:
            if (len(rows[-1]) + 1) * len(example.ids) > tokens and rows[-1]:
                rows.append([])
            rows[-1].append(example)
        draw.shuffle(rows)
        yield from map(_pad, rows)


def _pad(rows: list[Example]) -> Batch:
    length = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), length), END_OF_TEXT)
    positions = torch.zeros((len(rows), length), dtype=torch.long)
    targets = torch.full((len(rows), length), _IGNORED)
    for index, row in enumerate(rows):
        size = len(row.ids)
        ids[index, :size] = torch.tensor(row.ids)
        positions[index, :size] = torch.tensor(row.positions)
        learned = torch.tensor(row.learned[1:])
        targets[index, : size - 1] = torch.where(learned, ids[index, 1:size], _IGNORED)
    return Batch(ids, positions, targets)


def train(
    network: Network, seed: int, steps: int, peak_rate: float, report: Callable[[str, Network], None]
) -> None:
    """Train ``network`` in place; call ``report`` with a line of progress from time to time."""
    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=peak_rate, betas=(0.9, 0.98), weight_decay=0.01)
    windows = batches(draw, window_example, WINDOW_TOKENS)
    wholes = batches(draw, whole_example, WHOLE_TOKENS)
    started = time.monotonic()
    for step in range(1, steps + 1):
        done = step / steps
        rate = peak_rate * min(1.0, step / 100) * (0.5 + 0.5 * math.cos(math.pi * done)) + 1e-6
        for group in optimizer.param_groups:
            group["lr"] = rate
        whole = done > 0.5 and step % 4 == 0
        batch = next(wholes if whole else windows)
        mask = batch.targets != _IGNORED
        targets = batch.targets[mask]
        logits = network(batch.ids, batch.positions, mask)
        right = logits.gather(1, targets[:, None])[:, 0]
        margin = right - logits.scatter(1, targets[:, None], -math.inf).amax(1)
        loss = F.cross_entropy(logits, targets)
        if done > 0.15:
            # Cross-entropy all but vanishes once a token is right; this keeps asking for more certainty.
            loss = loss + 0.004 * F.relu(WANTED_MARGIN - margin).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps:
            wrong = (margin <= 0).float().mean().item()
            report(
                f"step {step}/{steps}  {'whole ' if whole else 'window'}  loss {loss.item():.5f}"
                f"  wrong {wrong:.5f}  margin min {margin.min().item():.2f} mean {margin.mean().item():.2f}"
                f"  {time.monotonic() - started:.0f} s",
                network,
            )


def export(network: Network, folder: Path) -> None:
    """Write everything that vLLM needs into ``folder``; each file appears there complete."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        scratch = Path(name)
        write_tokenizer(scratch)
        _write_json(scratch / "config.json", network.shape.as_config())
        _write_json(scratch / "generation_config.json", {"eos_token_id": IM_END, "pad_token_id": END_OF_TEXT})
        state = {key: value.detach().contiguous() for key, value in network.state_dict().items()}
        save_file(state, scratch / "model.safetensors", metadata={"format": "pt"})
        for file in sorted(scratch.iterdir()):
            os.chmod(file, 0o644)
            os.replace(file, folder / file.name)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Read the command line, train, export."""
    defaults = {field.name: field.default for field in fields(Shape)}
    parser = argparse.ArgumentParser(description="Train the tiny model from a seed.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model into")
    parser.add_argument("--start", type=Path, help="folder of a model to go on from, instead of from nothing")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads; part of what makes a run repeatable"
    )
    parser.add_argument("--layers", type=int, default=defaults["layers"])
    parser.add_argument("--hidden", type=int, default=defaults["hidden"])
    parser.add_argument("--checkpoint", action="store_true", help="also export every 250 steps")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    lines = 0

    def report(line: str, network: Network) -> None:
        nonlocal lines
        lines += 1
        print(line, flush=True)
        if options.checkpoint and lines % 5 == 0:
            export(network, options.out)

    shape = Shape(layers=options.layers, hidden=options.hidden)
    torch.manual_seed(options.seed)
    network = Network(shape)
    if options.start:
        network.load_state_dict(load_file(options.start / "model.safetensors"))
    train(network, options.seed, options.steps, options.rate, report)
    export(network, options.out)


if __name__ == "__main__":
    main()
