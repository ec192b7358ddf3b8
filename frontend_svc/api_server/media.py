"""Keep the tenants' images and other media apart in vLLM's caches of them, and bound what images become.

vLLM finds a processed medium by a hash of its content, or by the name (`uuid`) that its client gave it, and
whoever names one need not send it. Both become part of a longer hash if there are options by which the medium
was read, which here include the salt of the tenant's prompts. The caches of the engines use the same hashes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from io import BytesIO
from threading import Lock
from typing import Any, Final

from PIL import Image
from vllm import envs
from vllm.multimodal import image as image_module
from vllm.multimodal.media.connector import global_thread_pool
from vllm.multimodal.media.image import ImageMediaIO
from vllm.renderers import BaseRenderer

from frontend_svc.api_server.request_limits import account_of_task
from tailrace.tenancy.keys import Tenant

# Of vLLM for one image, in versions without the setting.
_MAX_PIXELS: Final = 178_956_970
_TOO_MANY_PIXELS: Final = 1 << 62
# So many of the largest images may a request have: 2 GiB in memory, or 14 photos of 48 megapixels.
_LARGEST: Final = 4
# vLLM's opens no formats whose readers run other programs. Versions without it open all.
_open: Final = getattr(image_module, "open_image", Image.open)


def keep_media_apart(renderer: BaseRenderer) -> None:
    """Have each tenant find, by content or name, media that it has sent itself, or that tenants did with
    which it shares a cache."""
    process, process_async = renderer.process_for_engine, renderer.process_for_engine_async

    def salted(prompt: Any, *arguments: Any, **named_arguments: Any) -> Any:
        return process(_of_callers_tenant(prompt), *arguments, **named_arguments)

    async def salted_async(prompt: Any, *arguments: Any, **named_arguments: Any) -> Any:
        return await process_async(_of_callers_tenant(prompt), *arguments, **named_arguments)

    renderer.process_for_engine, renderer.process_for_engine_async = salted, salted_async
    # Prompts to embed are rendered completely in this executor.
    renderer._executor.submit = _with_context(renderer._executor.submit)


def bound_images() -> None:
    """Have a request's images refused that together have more pixels than four of the largest that vLLM
    allows: some kilobytes become half a gigabyte, before vLLM counts how many there are."""
    load_bytes, counting = ImageMediaIO.load_bytes, Lock()

    def bounded(self: Any, data: bytes) -> Any:
        account = account_of_task.get()
        most = _LARGEST * getattr(envs, "VLLM_MAX_IMAGE_PIXELS", _MAX_PIXELS)
        if account is not None and most > 0:
            pixels = _pixels(data)
            # A request's images are read in several threads.
            with counting:
                account.pixels += pixels
                in_all = account.pixels
            if in_all > most:
                # Of which vLLM makes 400.
                raise ValueError(f"The images of a request may have at most {most} pixels in total.")
        return load_bytes(self, data)

    ImageMediaIO.load_bytes = bounded
    global_thread_pool.submit = _with_context(global_thread_pool.submit)


def _pixels(data: bytes) -> int:
    """Return the size of an image by its header; 0 if it has none, as vLLM will say."""
    try:
        with _open(BytesIO(data)) as image:
            return int(image.width * image.height)
    except Image.DecompressionBombError:
        # Of which vLLM would make 500.
        return _TOO_MANY_PIXELS
    except Exception:  # noqa: BLE001 - whatever the reader of the format raises
        return 0


def _with_context(submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    """Return an executor's method whose tasks know the request that they are for."""

    def submit_with_context(function: Any, /, *arguments: Any, **named_arguments: Any) -> Future[Any]:
        return submit(copy_context().run, function, *arguments, **named_arguments)

    return submit_with_context


def _of_callers_tenant(prompt: Any) -> Any:
    account = account_of_task.get()
    return prompt if account is None or account.tenant is None else with_salted_media(prompt, account.tenant)


def with_salted_media(prompt: Any, tenant: Tenant) -> Any:
    """Return a tokenized prompt with the tenant's salt among the options of each kind of media in it."""
    if "encoder_prompt" in prompt:
        return {
            name: part if part is None else with_salted_media(part, tenant) for name, part in prompt.items()
        }
    media = prompt.get("multi_modal_data")
    if not media:
        return prompt
    salt = tenant.cache_salt(prompt.get("cache_salt"))
    options = dict(prompt.get("media_io_kwargs") or {})
    for kind in media:
        # vLLM has read the media, with options that had no salt, and does no more than hash these.
        options[kind] = {**(options.get(kind) or {}), "cache_salt": salt}
    return {**prompt, "media_io_kwargs": options}
