"""The scenarios: one function per fleet, which yields its rows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import numpy as np

from examples.fleet import Chat, Prompt, stream_chat
from tailrace.tiny import MODEL_PATH
from tailrace.tiny.task import task
from tests.features.fleets import ServedFleet, serve_fleet
from tests.features.models import make_adapter
from tests.features.moving import Moves, moved_chat
from tests.features.rows import Row
from tests.features.vision import image_url, make_vision_model
from tests.harness.servers import MODEL

_MAX_TRIES: Final = 4
GREEDY: Final[Mapping[str, object]] = {"temperature": 0}
_NGRAM: Final = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
_DRAFT: Final = {"method": "draft_model", "model": str(MODEL_PATH), "num_speculative_tokens": 3}


@dataclass(frozen=True, slots=True)
class Scale:
    """`streams` per row, `at_a_time` concurrently, each of at most `tokens` tokens, migrated `moves`
    times."""

    streams: int = 20
    at_a_time: int = 10
    tokens: int = 300
    moves: int = 2

    @property
    def every_tokens(self) -> int:
        """Tokens between two migrations; the last one is well before the end."""
        return self.tokens // (2 * self.moves + 1)


def seeded(number: int) -> Mapping[str, object]:
    """Return options for sampling, with a seed for each stream."""
    return {"temperature": 1.0, "seed": 100 + number}


def greedy(number: int) -> Mapping[str, object]:
    """Return options for greedy decoding."""
    return GREEDY


def ignoring_eos(options: Callable[[int], Mapping[str, object]]) -> Callable[[int], Mapping[str, object]]:
    """Wrap options to ignore the end token: answers of random weights, or of random draws, end anywhere."""
    return lambda number: {**options(number), "extra_body": {"ignore_eos": True}}


def long_prompt(number: int) -> str:
    """Return a task whose answer is longer than `tokens` of any row."""
    return task(f"wx{chr(97 + number % 26)}z", 110 + number, 60).prompt


def run_streams(
    served: ServedFleet,
    row: Row,
    scale: Scale,
    options: Callable[[int], Mapping[str, object]],
    model: Callable[[int], str] = lambda number: MODEL,
    make_prompt: Callable[[int], Prompt] = long_prompt,
) -> Row:
    """Run each stream undisturbed, then migrated.

    Rounding makes samples depend on the rest of the batch, and on a busy machine a stream can end before its
    migrations: such streams run again, each with the fleet to itself. If one differs, all run once more
    together without migrations: `unmoved` counts those that then differ.
    """

    def run_undisturbed(number: int) -> Chat:
        request = {"max_tokens": scale.tokens, **options(number)}
        return stream_chat(served.client, model(number), make_prompt(number), request)

    def run_both(number: int) -> tuple[Chat, Chat, Moves]:
        request = {"max_tokens": scale.tokens, **options(number)}
        undisturbed = run_undisturbed(number)
        moved, moves = moved_chat(
            served.client,
            served.fleet,
            model(number),
            make_prompt(number),
            request,
            scale.every_tokens,
            scale.moves,
        )
        return undisturbed, moved, moves

    with ThreadPoolExecutor(scale.at_a_time) as pool:
        results = list(pool.map(run_both, range(scale.streams)))
        if any(not moved.same_text_and_usage(undisturbed) for undisturbed, moved, _ in results):
            rerun = pool.map(run_undisturbed, range(scale.streams))
            row.unmoved = sum(
                not other.same_text_and_usage(undisturbed)
                for other, (undisturbed, *_) in zip(rerun, results, strict=True)
            )
    for number, (undisturbed, moved, moves) in enumerate(results):
        as_expected = row.may_differ or moved.same_text_and_usage(undisturbed)
        if as_expected and len(moves.committed) >= scale.moves:
            row.add(undisturbed, moved, moves)
        else:
            row.add_alone(*_retry_until_moved(lambda: run_both(number), scale.moves))  # noqa: B023
    return row


def _retry_until_moved(
    run_both: Callable[[], tuple[Chat, Chat, Moves]], min_moves: int
) -> tuple[Chat, Chat, Moves]:
    """Return the first run with enough migrations, or the last of a few."""
    for _ in range(_MAX_TRIES):
        undisturbed, moved, moves = run_both()
        if len(moves.committed) >= min_moves:
            break
    return undisturbed, moved, moves


def speculative(scale: Scale, folder: Path) -> Iterator[Row]:
    """Run speculative decoding with n-grams, which is migrated live."""
    with serve_fleet("n-gram", flags=["--speculative-config", json.dumps(_NGRAM)]) as served:
        yield run_streams(served, Row("speculative, n-gram", "greedy"), scale, greedy)
        note = "after a move drafts differ, and with them the draws: equal in distribution only"
        row = Row("speculative, n-gram", "seeded", note=note, may_differ=True)
        yield run_streams(served, row, scale, ignoring_eos(seeded))


def draft(scale: Scale, folder: Path) -> Iterator[Row]:
    """Run speculative decoding with a draft model, which is migrated by replay."""
    with serve_fleet("draft", flags=["--speculative-config", json.dumps(_DRAFT)]) as served:
        yield run_streams(served, Row("speculative, draft model", "greedy"), scale, greedy)


def adapters(scale: Scale, folder: Path) -> Iterator[Row]:
    """Run two LoRA adapters and the model itself, mixed in each batch."""
    paths = {name: make_adapter(folder / name, seed) for seed, name in enumerate(("a", "b"))}
    names = [*paths, MODEL]
    # Loaded at run time, as an operator would; the workers load each at its first request.
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    with serve_fleet("adapters", flags=["--enable-lora", "--max-loras", "3"]) as served:
        for name, path in paths.items():
            request = {"lora_name": name, "lora_path": str(path)}
            httpx.post(f"{served.url}/v1/load_lora_adapter", json=request, timeout=60).raise_for_status()
        model_name = lambda number: names[number % len(names)]  # noqa: E731
        for sampling, options in (("greedy", greedy), ("seeded", seeded)):
            yield run_streams(
                served, Row("LoRA adapters", sampling), scale, ignoring_eos(options), model_name
            )


def embedding(scale: Scale, folder: Path) -> Iterator[Row]:
    """Run embeddings, which are never migrated: every worker must return the same vector."""
    with serve_fleet("embedding", flags=["--runner=pooling"]) as served:
        note = "; ".join(sorted({": ".join(way) for way in served.move_methods().values()}))
        row = Row("embedding", "-", note=note, stays=True)
        texts = [long_prompt(number) for number in range(scale.streams)]
        # First sequentially; then concurrently, on both workers.
        alone = [served.client.embeddings.create(model=MODEL, input=text).data[0].embedding for text in texts]
        with ThreadPoolExecutor(scale.at_a_time) as pool:
            rerun = list(
                pool.map(
                    lambda text: served.client.embeddings.create(model=MODEL, input=text).data[0].embedding,
                    texts,
                )
            )
        for one, other in zip(alone, rerun, strict=True):
            row.count(bool(np.allclose(one, other, atol=1e-5)))
        yield row


def image(scale: Scale, folder: Path) -> Iterator[Row]:
    """Run prompts with an image, which are migrated live after prefill."""

    def image_prompt(number: int) -> Prompt:
        return [
            {"type": "image_url", "image_url": {"url": image_url(number)}},
            {"type": "text", "text": f"What is in picture {number}?"},
        ]

    model = make_vision_model(folder / "vision")
    with serve_fleet("image", str(model), flags=["--dtype=float32"]) as served:
        for sampling, options in (("greedy", greedy), ("seeded", seeded)):
            yield run_streams(
                served, Row("image prompt", sampling), scale, ignoring_eos(options), make_prompt=image_prompt
            )


SCENARIOS: Final[Mapping[str, Callable[[Scale, Path], Iterator[Row]]]] = {
    "speculative": speculative,
    "draft": draft,
    "adapters": adapters,
    "embedding": embedding,
    "image": image,
}
