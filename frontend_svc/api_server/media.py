"""Keep the tenants' images and other media apart in vLLM's caches of them.

vLLM finds a processed medium by a hash of its content, or by the name (`uuid`) that its client gave it, and
whoever names one need not send it. Both become part of a longer hash if there are options by which the medium
was read, which here include the salt of the tenant's prompts. The caches of the engines use the same hashes.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextvars import copy_context
from typing import Any

from vllm.renderers import BaseRenderer

from frontend_svc.api_server.request_limits import account_of_task
from tailrace.tenancy.keys import Tenant


def keep_media_apart(renderer: BaseRenderer) -> None:
    """Have each tenant find, by content or name, media that it has sent itself, or that tenants did with
    which it shares a cache."""
    process, process_async = renderer.process_for_engine, renderer.process_for_engine_async
    submit = renderer._executor.submit

    def salted(prompt: Any, *arguments: Any, **named_arguments: Any) -> Any:
        return process(_of_callers_tenant(prompt), *arguments, **named_arguments)

    async def salted_async(prompt: Any, *arguments: Any, **named_arguments: Any) -> Any:
        return await process_async(_of_callers_tenant(prompt), *arguments, **named_arguments)

    def submit_with_context(function: Any, /, *arguments: Any, **named_arguments: Any) -> Future[Any]:
        # Prompts to embed are rendered completely in this executor.
        future: Future[Any] = submit(copy_context().run, function, *arguments, **named_arguments)
        return future

    renderer.process_for_engine, renderer.process_for_engine_async = salted, salted_async
    renderer._executor.submit = submit_with_context


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
