"""What a body asks for, as limits count it: never less than vLLM makes of it."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from tailrace.tenancy.body import LimitRefusal, judge
from tailrace.tenancy.demand import NotAnObject, _listed_objects, demand_of

HELLO = {"role": "user", "content": "hello"}


def demand(**fields: object) -> tuple[int, int]:
    """Return the numbers of sequences and messages."""
    asked = demand_of(json.dumps(fields).encode(), 1_000, 1_000)
    return asked.sequences, asked.messages


@pytest.mark.parametrize(
    ("fields", "sequences", "messages"),
    [
        ({"prompt": "x"}, 1, 0),
        ({"prompt": ["x", "y"], "n": 3}, 6, 0),
        ({"prompt": [1, 2, 3], "n": 2}, 2, 0),
        ({"prompt": [[1, 2], [3]]}, 2, 0),
        ({"prompt": [], "n": None}, 1, 0),
        # Pydantic takes numbers in strings, and whole floats.
        ({"prompt": "x", "n": "30"}, 30, 0),
        ({"prompt": "x", "n": 3.0, "use_beam_search": True}, 3, 0),
        ({"prompt": "x", "best_of": 5}, 5, 0),
        ({"prompt": "x", "n": "many"}, 1, 0),
        ({"input": ["a", "b", "c"]}, 3, 0),
        ({"input": [HELLO, HELLO]}, 1, 2),
        ({"messages": [HELLO] * 5, "n": 2}, 2, 5),
        ({"messages": [[HELLO], [HELLO, HELLO]], "n": 2}, 4, 3),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4}]}, 1, 5),
        ({"messages": [HELLO], "tools": [{"type": "function"}] * 3}, 1, 4),
        ({"messages": ["odd", 3, None]}, 1, 3),
        ({"messages": [HELLO], "system": [{"type": "text", "text": "a"}] * 3}, 1, 4),
        ({"texts": ["a", "b"]}, 2, 0),
        ({"images": ["a", "b"]}, 2, 0),
        ({"inputs": [{"content": []}] * 3}, 3, 0),
        ({"query": "a", "documents": ["b", "c"]}, 2, 0),
        ({"queries": ["a", "b"], "documents": ["b", "c"]}, 4, 0),
        ({"queries": "a", "items": ["b", "c"]}, 2, 0),
        ({"data_1": ["a"], "data_2": ["b", "c"]}, 3, 0),
        ({"text_1": "a", "text_2": ["b", "c"]}, 2, 0),
        # Of a chat, they are for the template.
        ({"messages": [HELLO], "documents": [{"text": "b"}] * 3}, 1, 1),
    ],
)
def test_sequences_and_messages(fields: dict[str, object], sequences: int, messages: int) -> None:
    assert demand(**fields) == (sequences, messages)


def test_only_media_that_vllm_does_not_tokenize_is_no_text() -> None:
    large = "x" * 10_000

    def text_bytes(part: object) -> int:
        body = json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()
        return demand_of(body, 1_000, 1_000).text_bytes

    url = {"url": f"data:image/png;base64,{large}"}
    for media in (
        {"type": "image_url", "image_url": url},
        {"image_url": url},
        {"type": "input_audio", "input_audio": {"data": large, "format": "wav"}},
        {"type": "image", "source": {"type": "base64", "data": large}},
    ):
        assert text_bytes(media) < 200
    for text in (
        {"type": "text", "text": large},
        {"type": "image_url", "image_url": {"url": "u"}, "text": large},
        {"type": "tool_result", "content": large},
        {"type": ["image_url"], "image_url": url},
        {"type": "text", "image_url": url},
    ):
        assert text_bytes(text) > 10_000


def test_query_is_tokenized_once_for_each_document() -> None:
    def repeated_bytes(**fields: object) -> int:
        found = demand_of(json.dumps(fields).encode(), 1_000, 1_000)
        assert found.tokenized_bytes == found.text_bytes + found.repeated_bytes
        return found.repeated_bytes

    query = "x" * 1_000
    assert repeated_bytes(query=query, documents=["a"]) == 0
    assert repeated_bytes(query=query, documents=["a"] * 10) == 9 * len(json.dumps(query))
    assert repeated_bytes(queries=[query], documents=["a"] * 10) == 9 * len(json.dumps([query]))
    # Each of several has one document.
    assert repeated_bytes(queries=[query] * 10, documents=["a"] * 10) == 0
    image = {"content": [{"type": "image_url", "image_url": {"url": query}}]}
    for seen in (image, [image]):
        assert 0 < repeated_bytes(data_1=seen, data_2=["a"] * 10) < 500


def test_last_of_equal_names_counts_as_in_vllm() -> None:
    assert demand_of(b'{"n": 1, "n": 30}', 10, 10).sequences == json.loads('{"n": 1, "n": 30}')["n"]


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b"{", b'{"n": NaN}', "{}".encode("utf-16"), b'{"model": "\xff"}']
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(NotAnObject):
        demand_of(body, 10, 10)


@pytest.mark.parametrize("value", ["5", '"x"', "true", "[1]", "1e400", "{}", "null"])
def test_structured_outputs_are_an_object(value: str) -> None:
    body = f'{{"structured_outputs" : {value} }}'.encode()
    if value in ("{}", "null"):
        assert demand_of(body, 10, 10).has_outputs_object
        return
    with pytest.raises(LimitRefusal, match="structured_outputs must be an object"):
        judge(body, 1_000, 10, 10)


def test_estimate_grows_with_what_vllm_has_to_do() -> None:
    def loop_s(**fields: object) -> float:
        return demand_of(json.dumps(fields).encode(), 3_000, 10).loop_s

    small = loop_s(prompt="x")
    assert small < 0.001
    found = {"type": "file_search_call", "results": [{"text": "a"}] * 2_000}
    larger: list[dict[str, object]] = [
        {"prompt": "x" * 4_000_000},
        {"prompt": [1] * 200_000},
        {"messages": [HELLO] * 2_000},
        {"input": [found]},
        {"documents": [{}] * 2_000},
    ]
    for large in larger:
        assert loop_s(**large) > 0.005


@pytest.mark.parametrize("size", [0, 10_000])
def test_objects_are_counted_between_images(size: int) -> None:
    body = json.dumps({"images": [{"url": "x" * size}] * 300, "tools": [{}] * 300}, indent=1).encode()
    assert _listed_objects(body) == 600


def test_text_has_no_objects() -> None:
    """Programs and JSON in a message, and schemas, are not lists of objects."""
    rows = json.dumps([{"a": 1, "b": {}}] * 1_000, indent=1)
    schema = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1_000)}}
    for field in (
        {"messages": [{"role": "user", "content": rows}]},
        {"structured_outputs": {"json": schema}},
    ):
        body = json.dumps(field).encode()
        assert demand_of(body, 1_000, 10).loop_s < 0.002


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":[%s""],"n":2}' % (b'"",' * 100_000),
        b'{"input":[%s""],"n":2}' % (b'"",' * 100_000),
        b'{"messages":[%s{}]}' % (b"{}," * 100_000),
        b'{"messages":[%s[]]}' % (b"[[]]," * 100_000),
        b'{"messages":[{"content":[%s{}]}]}' % (b"{}," * 100_000),
        b'{"tools":[%s{}]}' % (b"{}," * 100_000),
    ],
)
def test_no_more_is_read_than_is_allowed(body: bytes) -> None:
    """Each item that is read is an object, and a megabyte of empty ones once took seconds."""
    demand_of(body, 50, 40)
    tracemalloc.start()
    try:
        asked = demand_of(body, 50, 40)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Copies of the body as it is, and no objects of its 100,000 items, of some 50 bytes each.
    assert peak < 4 * len(body) < 100_000 * 50
    assert (asked.sequences, asked.messages) in ((82, 0), (102, 0), (1, 51), (41, 51))


def test_commas_of_texts_are_no_items() -> None:
    texts = [", " * 10_000] * 3
    assert demand(
        prompt=texts, messages=[{"content": [{"type": "text", "text": text} for text in texts]}]
    ) == (
        3,
        4,
    )


def test_tensors_of_prompts_are_no_text() -> None:
    body = json.dumps({"prompt_embeds": ["x" * 10_000] * 2}).encode()
    asked = demand_of(body, 10, 10)
    assert asked.text_bytes < 100 and asked.sequences == 2


@pytest.mark.parametrize("n", [b"[1,2]", b"{}", b"1" * 5_000, b'"' + b"1" * 5_000 + b'"', b"null", b"-3"])
def test_odd_numbers_count_as_one(n: bytes) -> None:
    assert demand_of(b'{"n": %s}' % n, 10, 10).sequences == 1
