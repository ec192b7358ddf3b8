"""Which models the fleet serves, under which names, and which front ends serve them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final

import msgspec

from edge_svc.configuration import Endpoints
from tailrace.records import AdapterRecord, ServiceRecord

TOKENIZING: Final = frozenset({"/tokenize", "/detokenize"})
GENERATING: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
STATE: Final = frozenset({"/metrics", "/load", "/version"})
"""Paths of vLLM's that tell the state of one API server."""
RUST_PATHS: Final = TOKENIZING | GENERATING | STATE
"""Paths that vllm-rs answers."""
# What it lacks of them (docs/api-servers.md): these fields of a body with another value than the named ones.
# It answers with 400, or ignores the field, or with 500: it gives no reason for what an engine refuses, and
# checks no schema and no grammar.
_UNSET: Final = frozenset({b"", b"null"})
_OFF: Final = _UNSET | {b"false"}
_RUST_FIELDS: Final[Mapping[str, frozenset[bytes]]] = {
    "n": _UNSET | {b"1"},
    "use_beam_search": _OFF,
    "length_penalty": _UNSET,
    "spaces_between_special_tokens": _UNSET | {b"true"},
    "media_io_kwargs": _UNSET,
    "mm_processor_kwargs": _UNSET,
    "prompt_embeds": _UNSET,
    "return_token_offsets": _OFF,
    "return_prompt_text": _OFF,
    "return_mm_kwargs": _OFF,
    "prompt_logprobs": _UNSET,
    "structured_outputs": _UNSET,
    "allowed_token_ids": _UNSET,
    "bad_words": _UNSET | {b"[]"},
    "repetition_detection": _UNSET,
    # It uses one without --trust-request-chat-template.
    "chat_template": _UNSET,
}
# A response_format without a schema.
_SCHEMALESS: Final = re.compile(
    rb'null|\{\s*"type"\s*:\s*"(?:text|json_object)"\s*(?:,\s*"json_schema"\s*:\s*null\s*)?\}|'
)
_STRICT: Final = re.compile(rb'"strict"\s*:\s*true')
_NO_TOOLS: Final = _UNSET | {b"[]"}
_FREE_CHOICE: Final = _UNSET | {b'"auto"'}
# A list of prompts in place of one, or of its tokens.
_SEVERAL: Final = re.compile(rb'\s*\[\s*["\[]')
# Of a content part with an image, audio or video: which of them vllm-rs can prepare depends on the model.
_MEDIA: Final = (b'"image_', b'"audio_', b'"video_', b'"input_audio"')
_NOTHING: Final = msgspec.Raw(b"")
# Names that are remembered after their front ends have gone.
_GONE_MAX: Final = 1_000


class _Function(msgspec.Struct):
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None


class _Message(msgspec.Struct):
    """What of a chat's message decides whether vllm-rs takes it."""

    role: str = ""
    content: msgspec.Raw = _NOTHING
    tool_calls: list[_ToolCall] | None = None


_messages: Final = msgspec.json.Decoder(list[_Message])


class Asked(msgspec.Struct):
    """What a body says about who can answer it."""

    model: str | None = None
    # A text, its tokens, or a list of these. Whether it is what it should be, as all others, front ends say.
    prompt: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    # Names that a client may give.
    request_id: msgspec.Raw = _NOTHING
    session_id: msgspec.Raw = _NOTHING
    n: msgspec.Raw = _NOTHING
    allowed_token_ids: msgspec.Raw = _NOTHING
    bad_words: msgspec.Raw = _NOTHING
    repetition_detection: msgspec.Raw = _NOTHING
    use_beam_search: msgspec.Raw = _NOTHING
    length_penalty: msgspec.Raw = _NOTHING
    spaces_between_special_tokens: msgspec.Raw = _NOTHING
    media_io_kwargs: msgspec.Raw = _NOTHING
    mm_processor_kwargs: msgspec.Raw = _NOTHING
    prompt_embeds: msgspec.Raw = _NOTHING
    return_token_offsets: msgspec.Raw = _NOTHING
    return_prompt_text: msgspec.Raw = _NOTHING
    return_mm_kwargs: msgspec.Raw = _NOTHING
    prompt_logprobs: msgspec.Raw = _NOTHING
    echo: msgspec.Raw = _NOTHING
    logprobs: msgspec.Raw = _NOTHING
    structured_outputs: msgspec.Raw = _NOTHING
    response_format: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    tool_choice: msgspec.Raw = _NOTHING
    chat_template: msgspec.Raw = _NOTHING
    chat_template_kwargs: msgspec.Raw = _NOTHING
    vllm_xargs: msgspec.Raw = _NOTHING


@dataclass(frozen=True, slots=True)
class Served:
    """A name that users send: of a model, or of an adapter."""

    name: str
    # Public name of its model; the same for a model's first name.
    model: str
    # --model of its front ends.
    root: str
    # Whose API servers are vLLM's Rust one, and its Python one; empty: it has none.
    rust: str
    python: str
    # Whether all of the Rust ones were told how to parse tool calls.
    rust_tools: bool = True

    def cluster(self, path: str, asked: Asked) -> str:
        """Return the cluster that answers: vllm-rs, which is the faster one, what it can."""
        if self.rust and (not self.python or _rust_can(path, asked, self.rust_tools)):
            return self.rust
        return self.python


@dataclass(frozen=True, slots=True)
class Directory:
    """All names, and the clusters behind them."""

    names: Mapping[str, Served]
    clusters: tuple[Endpoints, ...]
    # Names of models that were here before, and whose front ends are all away.
    gone: frozenset[str] = frozenset()
    # gRPC addresses of the front ends, by cluster.
    reporting: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def after(self, before: Directory) -> Directory:
        """Return this directory, which also knows what was there before it.

        Requests for a Python app that has gone are to be tried again, rather than refused by vllm-rs.
        """
        models = {served.model for served in self.names.values()}
        lost = {name for name, served in before.names.items() if served.model not in models}
        gone = sorted((before.gone | lost) - self.names.keys())
        names = {name: _with_python(served, before.names.get(name)) for name, served in self.names.items()}
        return replace(self, names=names, gone=frozenset(gone[:_GONE_MAX]))

    def asleep(self, cluster: str) -> Sequence[str]:
        """Return the addresses of a cluster's front ends if each starts its API server with the first
        connection, and has not yet; nothing if one answers, or there is none."""
        for each in self.clusters:
            if each.cluster == cluster:
                return each.addresses if each.asleep else ()
        return ()

    def find(self, name: str | None) -> Served | None:
        """Return who serves a name, or the only model if none is given; None if nobody does."""
        if name:
            return self.names.get(name)
        models = {served.model for served in self.names.values()}
        return self.names[models.pop()] if len(models) == 1 else None


def directory(services: Iterable[ServiceRecord], adapters: Iterable[AdapterRecord]) -> Directory:
    """Return the directory of these front ends. Where two models have the same name, the first one has it."""
    by_model: dict[str, list[ServiceRecord]] = {}
    for service in sorted(services, key=lambda each: each.service_id):
        if service.kind == "frontend" and service.http_address and service.model_name:
            by_model.setdefault(service.model_name, []).append(service)
    names: dict[str, Served] = {}
    clusters: list[Endpoints] = []
    reporting: dict[str, frozenset[str]] = {}
    for model, front_ends in sorted(by_model.items()):
        rust = [each for each in front_ends if each.api_server == "rust"]
        python = [each for each in front_ends if each.api_server != "rust"]
        served = Served(
            model,
            model,
            front_ends[0].model,
            _cluster(model, "rust", rust),
            _cluster(model, "python", python),
            all(each.parses_tools for each in rust),
        )
        for name, each in ((served.rust, rust), (served.python, python)):
            if name:
                clusters.append(_endpoints(name, each))
                reporting[name] = frozenset(front_end.address for front_end in each)
        names[model] = served
        for name in sorted({name for each in front_ends for name in each.names}):
            names.setdefault(name, replace(served, name=name))
    for adapter in sorted(adapters, key=lambda each: each.key):
        if (served_model := names.get(adapter.model)) is not None:
            # One that was loaded at run time: no other vllm-rs knows it.
            only = replace(served_model, rust="") if served_model.python else served_model
            names.setdefault(adapter.name, replace(only, name=adapter.name))
    return Directory(names, tuple(clusters), reporting=reporting)


def merged(directories: Iterable[Directory]) -> Directory:
    """Return one directory. The first one that has a name keeps it, and a model with all its names."""
    names: dict[str, Served] = {}
    clusters: list[Endpoints] = []
    models: set[str] = set()
    reporting: dict[str, frozenset[str]] = {}
    for each in directories:
        own = [served for served in each.names.values() if served.model not in models]
        for served in own:
            names.setdefault(served.name, served)
        used = {name for served in own for name in (served.rust, served.python)}
        clusters += [endpoints for endpoints in each.clusters if endpoints.cluster in used]
        reporting |= {name: each.reporting[name] for name in used & each.reporting.keys()}
        models |= {served.model for served in own}
    return Directory(names, tuple(clusters), reporting=reporting)


def _with_python(served: Served, before: Served | None) -> Served:
    if served.python or before is None or before.model != served.model:
        return served
    return replace(served, python=before.python)


def _cluster(model: str, kind: str, front_ends: Sequence[ServiceRecord]) -> str:
    """Return a name that is fit for a file, which no two models share; empty without front ends."""
    return f"{kind}-{blake2b(model.encode(), digest_size=16).hexdigest()}" if front_ends else ""


def _endpoints(cluster: str, front_ends: Sequence[ServiceRecord]) -> Endpoints:
    """Return where these listen: those that are awake, if there are any."""
    awake = [each for each in front_ends if not each.asleep]
    used = awake or front_ends
    addresses = tuple(dict.fromkeys(each.http_address for each in used))
    https = frozenset(each.http_address for each in used if each.https)
    return Endpoints(cluster, addresses, https, asleep=not awake)


def _rust_can(path: str, asked: Asked, parses_tools: bool) -> bool:
    if path not in RUST_PATHS or _SEVERAL.match(asked.prompt):
        return False
    if any(bytes(getattr(asked, name)) not in values for name, values in _RUST_FIELDS.items()):
        return False
    if b'"messages"' in bytes(asked.chat_template_kwargs):
        # It renders them in place of the messages.
        return False
    if path in GENERATING and not _rust_can_generate(asked, parses_tools):
        return False
    messages = bytes(asked.messages)
    return not messages or (not any(word in messages for word in _MEDIA) and _rust_takes(messages))


def _rust_takes(messages: bytes) -> bool:
    """Return whether vllm-rs takes a chat as the Python app does.

    It answers 400 to a message without content, to the role `function` and to a refusal as content, and 500
    to a tool call whose arguments are empty or cut, which agents send back as they got them.
    """
    try:
        chat = _messages.decode(messages)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # Whoever answers refuses it.
        return True
    for message in chat:
        content = bytes(message.content)
        if message.role == "function" or (content[:1] == b"[" and b'"refusal"' in content):
            return False
        is_empty = content in _UNSET or (content[:1] == b"[" and not content[1:-1].strip())
        if is_empty and not message.tool_calls:
            return False
        if not all(_is_json(call.function.arguments) for call in message.tool_calls or () if call.function):
            return False
    return True


def _is_json(arguments: str | None) -> bool:
    if arguments is None:
        return True
    try:
        msgspec.json.decode(arguments, type=msgspec.Raw)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


def _rust_can_generate(asked: Asked, parses_tools: bool) -> bool:
    if bytes(asked.echo) not in _OFF and bytes(asked.logprobs) not in _OFF:
        # Those of the prompt.
        return False
    if not _SCHEMALESS.fullmatch(asked.response_format) or _STRICT.search(asked.tools):
        return False
    if bytes(asked.tools) in _NO_TOOLS or bytes(asked.tool_choice) == b'"none"':
        return True
    # A call that is asked for has the schema of its arguments.
    return parses_tools and bytes(asked.tool_choice) in _FREE_CHOICE
