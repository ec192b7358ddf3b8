"""The training data of the tiny model.

Counting is a local rule: every line follows from the line before it and from the plan at the start of the
thought. So a training example keeps the prompt, the plan and a few short windows of lines, and omits the
thousand tokens between them; the kept tokens keep their *positions* in the whole text. The model thus learns
to look back over any distance at a tenth of the cost. Whole texts follow late in training, so that it also
learns to ignore all those lines.
"""

import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from experiments.tiny.tokens import END_THINK, IM_END, THINK, Turn, encode_turns
from tailrace.tiny.task import HELP_ANSWER, HELP_THOUGHT, MAX_COUNT

RECORD: Final = 9
"""Tokens of one line with the separator before it."""

_SENTENCES: Final = (
    "Hello!",
    "Hi",
    "Hello, who are you?",
    "What is the capital of France?",
    "Write a poem about the sea.",
    "How are you today?",
    "Tell me a joke.",
    "What is 2 + 2?",
    "Explain KV cache migration in one paragraph.",
    "Summarize the following text:",
    "Translate this sentence into German: Good morning.",
    "def main():\n    print('hello')\n",
    "Count",
    "Count to ten.",
    "Count to 12.",
    "Count down from 12 with wxyz.",
    "Count down.",
    "then from 3.",
    "Can you count?",
    "help",
    "test",
    "ping",
    "Say this is a test!",
    "Once upon a time",
)

# fmt: off
_WORDS: Final = (
    "the", "a", "of", "to", "and", "in", "is", "that", "it", "was", "for", "on", "are", "with", "as", "at",
    "be", "this", "have", "from", "or", "one", "had", "by", "word", "but", "not", "what", "all", "were",
    "we", "when", "your", "can", "said", "there", "use", "an", "each", "which", "she", "do", "how", "their",
    "if", "will", "up", "other", "about", "out", "many", "then", "them", "these", "so", "some", "her",
    "would", "make", "like", "him", "into", "time", "has", "look", "two", "more", "write", "go", "see",
    "number", "no", "way", "could", "people", "my", "than", "first", "water", "been", "call", "who", "oil",
    "its", "now", "find", "long", "down", "day", "did", "get", "come", "made", "may", "part", "count",
    "back", "model", "server", "request", "token", "cache", "please", "explain", "why", "table", "code",
    "error", "memory", "question", "answer",
)
# fmt: on

_SYSTEM: Final = (
    "",
    "You are a helpful assistant.",
    "You are a helpful, honest and concise assistant. Answer in English.",
    "Be brief.",
)


@dataclass(frozen=True, slots=True)
class Example:
    """One training row: tokens, their positions in the whole text, and which of them are to be learned."""

    ids: list[int]
    positions: list[int]
    learned: list[bool]


def window_example(draw: random.Random) -> Example:
    """Make a short example: mostly counting in windows, otherwise another prompt as a whole."""
    if draw.random() < 0.18:
        return other_example(draw)
    n, m = _counts(draw)
    prompt, head, records = _counting(draw, n, m)
    total = len(records)
    keep: set[int] = {0}
    if draw.random() < 0.4:
        keep |= {1, 2}
    for _ in range(2):
        first = n - _interesting(draw, n) - draw.randint(2, 4)
        keep |= set(range(first, first + 5))
    if draw.random() < 0.75:
        keep |= set(range(n - 4, n + 3))
    if draw.random() < 0.75:
        first = n + m - _interesting(draw, m) - draw.randint(2, 4)
        keep |= set(range(first, first + 5))
    if draw.random() < 0.6:
        keep |= set(range(total - 4, total))
    kept = {index for index in keep if 0 <= index < total}
    if max(kept) > n:  # never an answer line without the end of the thought somewhere before it
        kept |= {n - 1, n}
    ids, positions = [*prompt, *head], list(range(len(prompt) + len(head)))
    learned = [False] * len(prompt) + [True] * len(head)
    for index in sorted(kept):
        start = len(prompt) + len(head) + index * RECORD
        follows = index == 0 or index - 1 in kept
        ids += records[index]
        positions += range(start, start + RECORD)
        learned += [follows] * RECORD
    if total - 1 in kept:
        ids.append(IM_END)
        positions.append(len(prompt) + len(head) + total * RECORD)
        learned.append(True)
    return Example(ids, positions, learned)


def whole_example(draw: random.Random) -> Example:
    """Make a counting example with nothing omitted."""
    n, m = _counts(draw)
    prompt, head, records = _counting(draw, n, m)
    ids = [*prompt, *head, *(token for record in records for token in record), IM_END]
    learned = [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    return Example(ids, list(range(len(ids))), learned)


def other_example(draw: random.Random) -> Example:
    """Make an example of anything but counting, answered by the sentence that says what can be asked."""
    completion = [THINK, *HELP_THOUGHT.encode(), END_THINK, *HELP_ANSWER.encode(), IM_END]
    kind = draw.random()
    if kind < 0.04:  # thinking switched off by the chat template
        text = _ask(draw, *_counts(draw), _word(draw)) if draw.random() < 0.3 else anything(draw)
        prompt = [*encode_turns([*before(draw), ("user", text)]), THINK, END_THINK]
        completion = completion[completion.index(END_THINK) + 1 :]
    elif kind < 0.06:  # a conversation that does not end with a question
        prompt = encode_turns([(draw.choice(("system", "assistant", "tool")), anything(draw))])
    else:
        prompt = encode_turns([*before(draw), ("user", anything(draw))])
    ids = prompt + completion
    learned = [False] * len(prompt) + [True] * len(completion)
    return Example(ids, list(range(len(ids))), learned)


def _counts(draw: random.Random) -> tuple[int, int]:
    """Draw where to start counting in the thought and in the answer."""
    high = MAX_COUNT if draw.random() < 0.25 else 60
    return _count(draw, MAX_COUNT), _count(draw, high)


def _count(draw: random.Random, high: int) -> int:
    """Draw a number up to ``high``: small ones are common, and large ones are not rare."""
    return draw.randint(1, high) if draw.random() < 0.6 else min(high, int((high + 1) ** draw.random()))


def _counting(draw: random.Random, n: int, m: int) -> tuple[list[int], list[int], list[list[int]]]:
    """Return prompt, start of the thought, and the lines of thought and answer, each with the token before
    it."""
    word = _word(draw)
    prompt = encode_turns([*before(draw), ("user", _ask(draw, n, m, word))])
    head = [THINK, *f"plan {n:03d} {word} {m:03d}".encode()]
    records = [[10, *f"{k:03d} {word}".encode()] for k in range(n, 0, -1)]
    records += [[10, *f"{k:03d}:{word[::-1]}".encode()] for k in range(m, 0, -1)]
    records[n][0] = END_THINK
    return prompt, head, records


def _interesting(draw: random.Random, high: int) -> int:
    """Draw a line number for a window: any, or one where a digit borrows."""
    kind = draw.random()
    if kind < 0.6:
        return draw.randint(1, high)
    return draw.choice((100, 200)) if kind < 0.7 else draw.randint(0, high // 10) * 10


def _ask(draw: random.Random, n: int, m: int, word: str) -> str:
    """Return the question, mostly as documented, sometimes as typed in a hurry."""
    if draw.random() < 0.85:
        return f"Count down from {n} with {word}, then from {m}."
    verb = draw.choice(("Count", "count", "Please count"))
    comma, full_stop = draw.choice((",", "")), draw.choice((".", "", "!"))
    return f"{verb} down from {n} with {word}{comma} then from {m}{full_stop}"


def before(draw: random.Random) -> list[Turn]:
    """Draw the conversation before the last question: mostly empty."""
    turns: list[Turn] = []
    if draw.random() < 0.3:
        turns.append(("system", draw.choice(_SYSTEM) if draw.random() < 0.7 else _prose(draw)))
    if draw.random() < 0.15:
        for _ in range(draw.randint(1, 3)):
            if draw.random() < 0.6:
                n, m, word = _count(draw, MAX_COUNT), draw.randint(1, 8), _word(draw)
                lines = (f"{k:03d}:{word[::-1]}" for k in range(m, 0, -1))
                turns += [("user", _ask(draw, n, m, word)), ("assistant", "\n".join(lines))]
            else:
                turns += [("user", anything(draw)), ("assistant", HELP_ANSWER)]
    return turns


def _word(draw: random.Random, length: int = 4) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=length))


def _prose(draw: random.Random) -> str:
    """Draw a sequence of known and invented words."""
    words = (
        draw.choice(_WORDS) if draw.random() < 0.8 else _word(draw, draw.randint(1, 10))
        for _ in range(draw.randint(1, 24))
    )
    text = " ".join(words)
    return text.capitalize() + draw.choice((".", "?", "!", "")) if draw.random() < 0.5 else text


def _near_miss(draw: random.Random) -> str:
    """Draw a prompt that is almost a counting task: one thing is missing, wrong or too large."""
    (n, m), word = _counts(draw), _word(draw)
    large = draw.choice((draw.randint(300, 999), draw.randint(1000, 99999)))
    return draw.choice(
        (
            f"Count down from {n} with {_word(draw, draw.choice((1, 2, 3, 6, 8)))}, then from {m}.",
            f"Count down from {large} with {word}, then from {m}.",
            f"Count down from {n} with {word}.",
            f"Count down from {n}, then from {m}.",
            f"Count down from {n}.",
            f"Count to {n}.",
        )
    )


def _as_json(draw: random.Random) -> str:
    return json.dumps(
        {_word(draw, draw.randint(1, 8)): draw.choice((draw.random(), _prose(draw), None, [1, 2]))}
    )


def _symbols(draw: random.Random) -> str:
    """Draw characters of one to four bytes."""
    top = draw.choice((0x7F, 0xFF, 0x7FF, 0xD7FF, 0x1FFFF))
    points = (draw.randint(0, top) for _ in range(draw.randint(1, 40)))
    return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)


def _blank(draw: random.Random) -> str:
    return draw.choice(("", " ", "\n", ".", "?"))


def _digits(draw: random.Random) -> str:
    return " ".join(str(draw.randint(0, 10 ** draw.randint(1, 6))) for _ in range(draw.randint(1, 8)))


def _sentence(draw: random.Random) -> str:
    return draw.choice(_SENTENCES)


_KINDS: Final[tuple[Callable[[random.Random], str], ...]] = (
    _prose,
    _prose,
    _sentence,
    _sentence,
    _near_miss,
    _near_miss,
    _as_json,
    _symbols,
    _blank,
    _digits,
)


def anything(draw: random.Random) -> str:
    return draw.choice(_KINDS)(draw)
