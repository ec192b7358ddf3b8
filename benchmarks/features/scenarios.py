"""What is tried: one function a fleet, each yielding its rows."""

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

from benchmarks.features.fleets import Served, serving
from benchmarks.features.models import make_adapter
from benchmarks.features.moving import Moves, moved_chat
from benchmarks.features.rows import Row
from benchmarks.features.vision import image_url, make_vision_model
from benchmarks.servers import MODEL
from examples.fleet import Chat, Prompt, stream_chat
from tailrace.tiny import MODEL_PATH
from tailrace.tiny.task import task

_TRIES: Final = 4
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
    """`streams` a row, so many at a time, each of `tokens` tokens at most, moved `moves` times."""

    streams: int = 20
    at_a_time: int = 10
    tokens: int = 300
    moves: int = 2

    @property
    def every_tokens(self) -> int:
        """Tokens between two moves: the last comes well before the end."""
        return self.tokens // (2 * self.moves + 1)


def seeded(number: int) -> Mapping[str, object]:
    """Sampled, each stream from a seed of its own."""
    return {"temperature": 1.0, "seed": 100 + number}


def greedy(number: int) -> Mapping[str, object]:
    """The likeliest token."""
    return GREEDY


def endless(options: Callable[[int], Mapping[str, object]]) -> Callable[[int], Mapping[str, object]]:
    """Of models with random weights, whose answers end anywhere."""
    return lambda number: {**options(number), "extra_body": {"ignore_eos": True}}


def prompts(number: int) -> str:
    """A task whose answer is longer than any row's `tokens`."""
    return task(f"wx{chr(97 + number % 26)}z", 110 + number, 60).prompt


def streams(
    served: Served,
    row: Row,
    scale: Scale,
    options: Callable[[int], Mapping[str, object]],
    model: Callable[[int], str] = lambda number: MODEL,
    ask: Callable[[int], Prompt] = prompts,
) -> Row:
    """Each stream undisturbed, then moved.

    What is sampled can depend on who shares its batches (rounding), and on a busy machine a stream can end
    before its moves: such streams are run once more, each with the fleet to itself. When one came out
    otherwise, all are run among others once more, unmoved: `unmoved` counts who differs then.
    """

    def once(number: int) -> Chat:
        asked = {"max_tokens": scale.tokens, **options(number)}
        return stream_chat(served.client, model(number), ask(number), asked)

    def both(number: int) -> tuple[Chat, Chat, Moves]:
        asked = {"max_tokens": scale.tokens, **options(number)}
        undisturbed = once(number)
        moved, moves = moved_chat(
            served.client,
            served.fleet,
            model(number),
            ask(number),
            asked,
            scale.every_tokens,
            scale.moves,
        )
        return undisturbed, moved, moves

    with ThreadPoolExecutor(scale.at_a_time) as pool:
        found = list(pool.map(both, range(scale.streams)))
        if any(not moved.same_text_and_usage(undisturbed) for undisturbed, moved, _ in found):
            again = pool.map(once, range(scale.streams))
            row.unmoved = sum(
                not other.same_text_and_usage(undisturbed)
                for other, (undisturbed, *_) in zip(again, found, strict=True)
            )
    for number, (undisturbed, moved, moves) in enumerate(found):
        as_it_must_be = row.may_differ or moved.same_text_and_usage(undisturbed)
        if as_it_must_be and len(moves.committed) >= scale.moves:
            row.add(undisturbed, moved, moves)
        else:
            row.add_alone(*_moved_enough(lambda: both(number), scale.moves))  # noqa: B023
    return row


def _moved_enough(both: Callable[[], tuple[Chat, Chat, Moves]], least: int) -> tuple[Chat, Chat, Moves]:
    """The first that was moved so often, or the last of a few."""
    for _ in range(_TRIES):
        undisturbed, moved, moves = both()
        if len(moves.committed) >= least:
            break
    return undisturbed, moved, moves


def speculative(scale: Scale, folder: Path) -> Iterator[Row]:
    """n-gram: live."""
    with serving("n-gram", engine=[f"speculative_config={json.dumps(_NGRAM)}"]) as served:
        yield streams(served, Row("speculative, n-gram", "greedy"), scale, greedy)
        note = "after a move drafts differ, and with them the draws: equal in distribution only"
        row = Row("speculative, n-gram", "seeded", note=note, may_differ=True)
        yield streams(served, row, scale, seeded)


def draft(scale: Scale, folder: Path) -> Iterator[Row]:
    """A draft model: by replay."""
    with serving("draft", engine=[f"speculative_config={json.dumps(_DRAFT)}"]) as served:
        yield streams(served, Row("speculative, draft model", "greedy"), scale, greedy)


def adapters(scale: Scale, folder: Path) -> Iterator[Row]:
    """Two adapters and the model itself, mixed in each batch."""
    paths = {name: make_adapter(folder / name, seed) for seed, name in enumerate(("a", "b"))}
    names = [*paths, MODEL]
    # As an operator would, while it runs; the workers load each when it is first asked for.
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    with serving("adapters", engine=["enable_lora=true", "max_loras=3"], front=["--enable-lora"]) as served:
        for name, path in paths.items():
            asked = {"lora_name": name, "lora_path": str(path)}
            httpx.post(f"{served.url}/v1/load_lora_adapter", json=asked, timeout=60).raise_for_status()
        named = lambda number: names[number % len(names)]  # noqa: E731
        for sampling, options in (("greedy", greedy), ("seeded", seeded)):
            yield streams(served, Row("LoRA adapters", sampling), scale, endless(options), named)


def embedding(scale: Scale, folder: Path) -> Iterator[Row]:
    """Placed, never moved: the same vector wherever it is computed."""
    engine = ["runner=pooling"]
    with serving("embedding", engine=engine, front=["--runner=pooling"]) as served:
        note = "; ".join(sorted({": ".join(way) for way in served.ways().values()}))
        row = Row("embedding", "-", note=note, stays=True)
        texts = [prompts(number) for number in range(scale.streams)]
        # The first pass one after the other; the second all at once, over both workers.
        alone = [served.client.embeddings.create(model=MODEL, input=text).data[0].embedding for text in texts]
        with ThreadPoolExecutor(scale.at_a_time) as pool:
            again = list(
                pool.map(
                    lambda text: served.client.embeddings.create(model=MODEL, input=text).data[0].embedding,
                    texts,
                )
            )
        for one, other in zip(alone, again, strict=True):
            row.count(bool(np.allclose(one, other, atol=1e-5)))
        yield row


def image(scale: Scale, folder: Path) -> Iterator[Row]:
    """An image in each prompt: live, once the prompt is computed."""

    def seeing(number: int) -> Prompt:
        return [
            {"type": "image_url", "image_url": {"url": image_url(number)}},
            {"type": "text", "text": f"What is in picture {number}?"},
        ]

    model = make_vision_model(folder / "vision")
    with serving("image", str(model), engine=["dtype=float32"], front=["--dtype=float32"]) as served:
        for sampling, options in (("greedy", greedy), ("seeded", seeded)):
            yield streams(served, Row("image prompt", sampling), scale, endless(options), ask=seeing)


SCENARIOS: Final[Mapping[str, Callable[[Scale, Path], Iterator[Row]]]] = {
    "speculative": speculative,
    "draft": draft,
    "adapters": adapters,
    "embedding": embedding,
    "image": image,
}
