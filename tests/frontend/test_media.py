"""A tenant finds no other tenant's media in vLLM's caches, by name or by content, and a request's images
together are bounded.

vLLM's own renderer and processor of a multimodal model, whose media are sounds because images need
torchvision.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from PIL import Image

from tailrace.tenancy.keys import Tenant
from tailrace.tiny import MODEL_PATH

pytestmark = pytest.mark.vllm

BEGIN, SOUND, END = "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"
A, B = Tenant(name="a"), Tenant(name="b")
SHARING: Final = tuple(Tenant(name=name, shared_cache="acme") for name in "cd")
LOW, HIGH = (np.sin(np.arange(1_600, dtype=np.float32) * step) for step in (0.1, 0.2))


def write_model(folder: Path) -> Path:
    """Write a model that hears, without weights, and return its path."""
    shutil.copytree(MODEL_PATH, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    text = json.loads((folder / "config.json").read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    first = text["vocab_size"]
    for at, content in enumerate((SOUND, BEGIN, END), first):
        tokenizer["added_tokens"].append({"id": at, "content": content, **plain})
    ear = {
        "model_type": "qwen2_audio_encoder",
        "d_model": 64,
        "encoder_layers": 1,
        "encoder_attention_heads": 1,
        "encoder_ffn_dim": 64,
        "num_mel_bins": 16,
    }
    config = {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "model_type": "qwen2_audio",
        "audio_token_index": first,
        "audio_config": ear,
        "text_config": {**text, "model_type": "qwen2", "vocab_size": first + 3},
        "dtype": "float32",
    }
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16}
    files = {"tokenizer.json": tokenizer, "config.json": config, "preprocessor_config.json": extractor}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


class Renderer:
    """vLLM's renderer as an API server has it."""

    def __init__(self, model: Path) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.renderers.registry import renderer_from_config

        from frontend_svc.api_server.media import keep_media_apart

        config = AsyncEngineArgs(model=str(model), max_model_len=512, dtype="float32").create_engine_config()
        config.parallel_config._api_process_count = 2
        self.vllm: Any = renderer_from_config(config)
        keep_media_apart(self.vllm)

    def prompt(self, sound: Any, name: str | None) -> dict[str, Any]:
        """Return a completion's prompt with a sound."""
        tokens = self.vllm.get_tokenizer().encode(f"{BEGIN}{SOUND}{END}")
        media = {"multi_modal_data": {"audio": [sound]}, "multi_modal_uuids": {"audio": [name]}}
        return {"prompt_token_ids": tokens, **media}

    async def hear(self, sound: Any, name: str | None) -> Any:
        """Render a completion with a sound."""
        (rendered,) = await self.vllm.render_cmpl_async([self.prompt(sound, name)])
        return rendered

    async def recall(self, name: str, options: dict[str, Any] | None = None) -> Any:
        """Render a chat with the name of a sound alone. `options`: for reading it."""
        from vllm.renderers.params import ChatParams

        params = ChatParams(
            chat_template="{{messages[0].content}}",
            chat_template_content_format="string",
            media_io_kwargs=options,
        )
        part = {"type": "input_audio", "input_audio": None, "uuid": name}
        _, (rendered,) = await self.vllm.render_chat_async([[{"role": "user", "content": [part]}]], params)
        return rendered

    async def embed(self, sound: Any, name: str | None) -> Any:
        """Render a prompt as vLLM does for embeddings."""
        render, loop = self.vllm.render_cmpl, asyncio.get_running_loop()
        (rendered,) = await loop.run_in_executor(self.vllm._executor, render, [self.prompt(sound, name)])
        return rendered


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Renderer]:
    renderer = Renderer(write_model(tmp_path_factory.mktemp("model") / "hears"))
    yield renderer
    renderer.vllm.shutdown()


@pytest.fixture
def renderer(started: Renderer) -> Renderer:
    started.vllm.clear_mm_cache()
    return started


def as_tenant(tenant: Tenant | None, call: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """Call in a task that serves a request of the tenant."""
    from frontend_svc.api_server.request_limits import account_of_task

    async def serve() -> Any:
        account: Any = SimpleNamespace(tenant=tenant, pixels=0)
        account_of_task.set(account)
        return await call(*arguments)

    return asyncio.run(serve())


def features(rendered: Any) -> np.ndarray[Any, Any]:
    (item,) = rendered["mm_kwargs"]["audio"]
    return np.asarray(item["input_features"].data)


def test_only_who_named_a_medium_has_the_model_answer_about_it_by_name(renderer: Renderer) -> None:
    sent = features(as_tenant(A, renderer.hear, LOW, "mine"))
    assert np.array_equal(features(as_tenant(A, renderer.recall, "mine")), sent)
    salt = {"audio": {"cache_salt": A.cache_salt(None)}}
    for tenant, options in ((B, None), (B, salt), (None, None)):
        with pytest.raises(ValueError, match="Cache miss"):
            as_tenant(tenant, renderer.recall, "mine", options)


def test_tenants_that_share_a_cache_share_media(renderer: Renderer) -> None:
    one, other = SHARING
    sent = as_tenant(one, renderer.hear, LOW, "ours")
    recalled = as_tenant(other, renderer.recall, "ours")
    assert recalled["mm_hashes"] == sent["mm_hashes"]
    with pytest.raises(ValueError, match="Cache miss"):
        as_tenant(Tenant(name="acme"), renderer.recall, "ours")


@pytest.mark.parametrize("way", ["hear", "embed"])
def test_a_name_that_two_tenants_give_is_of_two_media(renderer: Renderer, way: str) -> None:
    render = getattr(renderer, way)
    low, high = as_tenant(A, render, LOW, "logo"), as_tenant(B, render, HIGH, "logo")
    assert not np.array_equal(features(low), features(high))
    assert low["mm_hashes"] != high["mm_hashes"]


@pytest.mark.parametrize("way", ["hear", "embed"])
def test_engines_do_not_tell_a_tenant_that_another_has_sent_a_medium(renderer: Renderer, way: str) -> None:
    """Their caches have the hashes that the renderer gives."""
    render = getattr(renderer, way)
    hashes = [as_tenant(tenant, render, LOW, None)["mm_hashes"]["audio"][0] for tenant in (A, A, B, None)]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_without_keys_names_are_as_vllm_has_them(renderer: Renderer) -> None:
    assert as_tenant(None, renderer.hear, LOW, "mine")["mm_hashes"] == {"audio": ["mine"]}


@pytest.mark.parametrize("scheme", ["data", "http"])
def test_images_of_a_request_are_bounded_together(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """A kilobyte of PNG may be half a gigabyte of pixels, and a request have 999."""
    from vllm.multimodal.media import connector
    from vllm.multimodal.media.image import ImageMediaIO

    from frontend_svc.api_server.media import bound_images

    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "10000")
    monkeypatch.setattr(ImageMediaIO, "load_bytes", ImageMediaIO.load_bytes)
    monkeypatch.setattr(connector.global_thread_pool, "submit", connector.global_thread_pool.submit)
    bound_images()
    png = BytesIO()
    Image.new("1", (60, 60)).save(png, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"

    class Connection:
        async def async_get_bytes(self, url: str, **options: object) -> bytes:
            return png.getvalue()

    if scheme == "http":
        url = "http://images/a.png"
    fetch = connector.MediaConnector(connection=Connection()).fetch_image_async

    async def several(count: int) -> list[Any]:
        return await asyncio.gather(*(fetch(url) for _ in range(count)))

    for tenant in (None, A):
        assert [image.media.size for image in as_tenant(tenant, several, 11)] == [(60, 60)] * 11
    with pytest.raises(ValueError, match="at most 40000 pixels in total"):
        as_tenant(A, several, 12)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="at most 40000 pixels in total"):
        # Pillow itself refuses one of more than twice as many.
        patch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000)
        as_tenant(A, several, 1)
    # The second is one of a format that vLLM does not take.
    for unknown in (b"odd", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 500 500\n%%EndComments\n"):
        with pytest.raises(ValueError, match="cannot identify"):
            as_tenant(A, fetch, f"data:image/png;base64,{base64.b64encode(unknown).decode()}")


def test_the_encoders_part_of_a_prompt_has_the_media() -> None:
    from frontend_svc.api_server.media import with_salted_media

    heard = {"prompt_token_ids": [1], "multi_modal_data": {"audio": [LOW]}, "cache_salt": "own"}
    text = {"prompt_token_ids": [2]}
    salted = with_salted_media({"encoder_prompt": heard, "decoder_prompt": text}, A)
    options = {"audio": {"cache_salt": A.cache_salt("own")}}
    assert salted == {"encoder_prompt": {**heard, "media_io_kwargs": options}, "decoder_prompt": text}
    assert with_salted_media({"encoder_prompt": text, "decoder_prompt": None}, A)["decoder_prompt"] is None
