"""Which cluster answers which request."""

from __future__ import annotations

import msgspec
import pytest

from edge_svc.configuration import endpoints
from edge_svc.directory import Asked, directory, merged
from tailrace.records import AdapterRecord, ServiceRecord


def front_end(name: str, model: str, port: int, api_server: str = "python", **more: object) -> ServiceRecord:
    """Return the record of a front end that listens on this port."""
    record = ServiceRecord(
        kind="frontend",
        service_id=name,
        incarnation="i",
        address="127.0.0.1:1",
        http_address=f"127.0.0.1:{port}",
        model_name=model,
        model=f"/models/{model}",
        api_server=api_server,
    )
    return msgspec.structs.replace(record, **more)


def test_each_name_leads_to_its_model() -> None:
    found = directory(
        [
            front_end("f0", "chat", 1, names=["chat-latest", "poet"]),
            front_end("f1", "chat", 2, names=["chat-latest", "poet"]),
            front_end("g0", "code", 3),
            msgspec.structs.replace(front_end("m", "none", 4), kind="monitor"),
        ],
        [
            AdapterRecord(model="code", name="sql", path="/a"),
            # A name that a model has stays the model's; an adapter of nobody has none.
            AdapterRecord(model="code", name="chat", path="/a"),
            AdapterRecord(model="gone", name="lost", path="/a"),
        ],
    )
    assert {name: each.model for name, each in found.names.items()} == {
        "chat": "chat",
        "chat-latest": "chat",
        "poet": "chat",
        "code": "code",
        "sql": "code",
    }
    addresses = {each.cluster: list(each.addresses) for each in found.clusters}
    chat, code = found.names["poet"].python, found.names["sql"].python
    assert addresses == {chat: ["127.0.0.1:1", "127.0.0.1:2"], code: ["127.0.0.1:3"]}
    assert found.find("lost") is None
    # Two models: one has to be named.
    assert found.find(None) is None


def test_the_only_model_needs_no_name() -> None:
    found = directory([front_end("f0", "chat", 1, names=["alias"])], [])
    assert found.find(None) == found.names["chat"]
    assert found.find("") == found.names["chat"]


def test_front_ends_that_share_a_port_are_one_endpoint() -> None:
    found = directory([front_end("f0", "chat", 1), front_end("f1", "chat", 1)], [])
    assert [list(each.addresses) for each in found.clusters] == [["127.0.0.1:1"]]


CHAT = "/v1/chat/completions"
CALLS = '[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "%s"}}]}]'
# Chats, and whether vllm-rs takes them.
CHATS = (
    ('[{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"text": "b"}]}]', True),
    (CALLS % "{}", True),
    (CALLS % r"{\"a\": [1]}", True),
    (CALLS % "", False),
    (CALLS % "{", False),
    (CALLS % ("[" * 100_000), False),
    ('[{"role": "assistant", "content": null}]', False),
    ('[{"role": "assistant", "content": null, "tool_calls": [{"function": {"arguments": "1"}}]}]', True),
    ('[{"role": "user"}]', False),
    ('[{"role": "user", "content": [ ]}]', False),
    ('[{"role": "function", "name": "f", "content": "a"}]', False),
    ('[{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]', False),
    # What is no chat, whoever answers refuses.
    ('"a"', True),
    ("[1]", True),
    ("[" * 100_000, True),
)


@pytest.mark.parametrize(
    ("path", "asked", "rust"),
    [
        ("/v1/chat/completions", Asked(), True),
        ("/v1/chat/completions", Asked(n=msgspec.Raw(b"1")), True),
        ("/v1/chat/completions", Asked(n=msgspec.Raw(b"2")), False),
        ("/v1/chat/completions", Asked(n=msgspec.Raw(b"null")), True),
        ("/v1/chat/completions", Asked(n=msgspec.Raw(b'"2"')), False),
        ("/v1/completions", Asked(prompt=msgspec.Raw(b' "a [" ')), True),
        ("/v1/completions", Asked(prompt=msgspec.Raw(b'["a", "b"]')), False),
        ("/v1/completions", Asked(prompt=msgspec.Raw(b"[[1], [2]]")), False),
        ("/v1/completions", Asked(prompt=msgspec.Raw(b"[1, 2]")), True),
        ("/v1/completions", Asked(length_penalty=msgspec.Raw(b"1.0")), False),
        ("/v1/completions", Asked(spaces_between_special_tokens=msgspec.Raw(b"true")), True),
        ("/v1/chat/completions", Asked(use_beam_search=msgspec.Raw(b"true")), False),
        ("/v1/chat/completions", Asked(use_beam_search=msgspec.Raw(b"false")), True),
        ("/v1/chat/completions", Asked(messages=msgspec.Raw(b'[{"type": "image_url"}]')), False),
        ("/v1/chat/completions", Asked(messages=msgspec.Raw(b'[{"content": "image_url"}]')), False),
        ("/v1/chat/completions", Asked(messages=msgspec.Raw(b'[{"content": "an image_url"}]')), True),
        *((CHAT, Asked(messages=msgspec.Raw(chat.encode())), rust) for chat, rust in CHATS),
        ("/v1/completions", Asked(bad_words=msgspec.Raw(b'["a"]')), False),
        ("/v1/completions", Asked(bad_words=msgspec.Raw(b"[]")), True),
        ("/v1/completions", Asked(repetition_detection=msgspec.Raw(b"{}")), False),
        ("/v1/responses", Asked(), False),
        ("/v1/embeddings", Asked(), False),
        ("/tokenize", Asked(), True),
        ("/metrics", Asked(), True),
        ("/v1/completions", Asked(prompt_logprobs=msgspec.Raw(b"0")), False),
        ("/v1/completions", Asked(echo=msgspec.Raw(b"true")), True),
        ("/v1/completions", Asked(logprobs=msgspec.Raw(b"1")), True),
        ("/v1/completions", Asked(echo=msgspec.Raw(b"true"), logprobs=msgspec.Raw(b"0")), False),
        ("/v1/chat/completions", Asked(response_format=msgspec.Raw(b"null")), True),
        ("/v1/chat/completions", Asked(response_format=msgspec.Raw(b'{ "type": "json_object" }')), True),
        (
            "/v1/chat/completions",
            Asked(response_format=msgspec.Raw(b'{"type": "json_object", "json_schema": null}')),
            True,
        ),
        ("/v1/chat/completions", Asked(response_format=msgspec.Raw(b'{"type": "json_schema"}')), False),
        (
            "/v1/chat/completions",
            Asked(tools=msgspec.Raw(b"[{}]"), tool_choice=msgspec.Raw(b'"required"')),
            False,
        ),
        (
            "/v1/chat/completions",
            Asked(tools=msgspec.Raw(b"[{}]"), tool_choice=msgspec.Raw(b'{"type": "function"}')),
            False,
        ),
        ("/v1/chat/completions", Asked(tools=msgspec.Raw(b'[{"function": {"strict": false}}]')), True),
        ("/v1/chat/completions", Asked(tools=msgspec.Raw(b'[{"function": {"strict": true}}]')), False),
        ("/v1/chat/completions", Asked(chat_template_kwargs=msgspec.Raw(b'{"thinking": true}')), True),
        ("/v1/chat/completions", Asked(chat_template_kwargs=msgspec.Raw(b'{"messages": 1}')), False),
    ],
)
def test_vllm_rs_gets_what_it_can_answer(path: str, asked: Asked, rust: bool) -> None:
    both = directory([front_end("f0", "chat", 1), front_end("f1", "chat", 2, "rust")], []).names["chat"]
    assert both.cluster(path, asked) == (both.rust if rust else both.python)
    alone = directory([front_end("f1", "chat", 2, "rust")], []).names["chat"]
    assert alone.cluster(path, asked) == alone.rust


@pytest.mark.parametrize(
    ("asked", "rust"),
    [
        (Asked(), True),
        (Asked(tools=msgspec.Raw(b"[]")), True),
        (Asked(tools=msgspec.Raw(b"[{}]"), tool_choice=msgspec.Raw(b'"none"')), True),
        (Asked(tools=msgspec.Raw(b"[{}]")), False),
        (Asked(tools=msgspec.Raw(b"[{}]"), tool_choice=msgspec.Raw(b'"auto"')), False),
    ],
)
def test_tools_are_kept_from_vllm_rs_that_cannot_parse_their_calls(asked: Asked, rust: bool) -> None:
    able = front_end("f1", "chat", 2, "rust")
    unable = front_end("f2", "chat", 3, "rust", parses_tools=False)
    for front_ends, to_rust in (([able], True), ([able, unable], rust), ([unable], rust)):
        found = directory([front_end("f0", "chat", 1), *front_ends], []).names["chat"]
        assert found.cluster("/v1/chat/completions", asked) == (found.rust if to_rust else found.python)
        assert found.cluster("/tokenize", asked) == found.rust


def test_an_adapter_that_was_loaded_at_run_time_is_known_to_the_python_app_alone() -> None:
    adapters = [AdapterRecord(model="chat", name="sql", path="/a")]
    both = directory([front_end("f0", "chat", 1), front_end("f1", "chat", 2, "rust")], adapters)
    assert both.names["sql"].cluster("/v1/completions", Asked()) == both.names["chat"].python
    alone = directory([front_end("f1", "chat", 2, "rust")], adapters)
    assert alone.names["sql"].cluster("/v1/completions", Asked()) == alone.names["chat"].rust


def test_front_ends_that_are_asleep_are_for_nobody_while_another_one_is_awake() -> None:
    asleep, rust = front_end("f0", "chat", 1, asleep=True), front_end("f1", "chat", 2, "rust")
    found = directory([asleep, rust], [])
    served = found.names["chat"]
    assert (found.asleep(served.python), found.asleep(served.rust)) == (("127.0.0.1:1",), ())
    by_name = {each.cluster: each for each in found.clusters}
    (lone,) = endpoints(by_name[served.python])["resources"][0]["endpoints"][0]["lb_endpoints"]
    # A health check would start it.
    assert lone["endpoint"]["health_check_config"] == {"disable_active_health_check": True}
    found = directory([asleep, front_end("f2", "chat", 3), rust], [])
    assert found.asleep(served.python) == ()
    (awake,) = (each for each in found.clusters if each.cluster == served.python)
    assert awake.addresses == ("127.0.0.1:3",)
    (lone,) = endpoints(awake)["resources"][0]["endpoints"][0]["lb_endpoints"]
    assert "health_check_config" not in lone["endpoint"]


def test_what_needs_a_python_app_that_has_gone_is_not_sent_to_vllm_rs() -> None:
    rust = front_end("f1", "chat", 2, "rust")
    before = directory([front_end("f0", "chat", 1), rust], [])
    after = directory([rust], []).after(before)
    assert after.names["chat"].cluster("/v1/responses", Asked()) == before.names["chat"].python
    assert after.names["chat"].cluster("/v1/completions", Asked()) == before.names["chat"].rust
    # The other way round, the Python app takes all.
    after = directory([front_end("f0", "chat", 1)], []).after(before)
    assert after.names["chat"].cluster("/v1/completions", Asked()) == before.names["chat"].python


def test_what_an_earlier_cluster_names_a_later_one_does_not_change() -> None:
    own = directory([front_end("f0", "chat", 1, names=["poet"])], [])
    first = directory(
        [front_end("f0", "chat", 2, "rust", names=["lost"]), front_end("g0", "code", 3, names=["poet", "c"])],
        [
            AdapterRecord(model="code", name="sql", path="/a"),
            AdapterRecord(model="chat", name="no", path="/a"),
        ],
    )
    second = directory([front_end("h0", "c", 4, names=["d"])], [])
    found = merged([own, first, second])
    assert {name: each.model for name, each in found.names.items()} == {
        "chat": "chat",
        "poet": "chat",
        "code": "code",
        "c": "code",
        "sql": "code",
        "d": "c",
    }
    assert [list(each.addresses) for each in found.clusters] == [
        ["127.0.0.1:1"],
        ["127.0.0.1:3"],
        ["127.0.0.1:4"],
    ]
    assert found.find(None) is None
    alone = merged([directory([], []), second])
    assert alone.find(None) == second.names["c"]
