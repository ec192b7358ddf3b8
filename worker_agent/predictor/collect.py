"""Collect samples: run prompts through vLLM and store hidden states at intervals (ARES, section 4.4)."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.json_value import JsonValue
from tailrace.predictor.samples import FORMAT, Origin, Samples
from tailrace.tiny.task import make_task


class PromptsError(ValueError):
    """A file of prompts is invalid; the message names file, line and field."""


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str


class _Line(msgspec.Struct, frozen=True):
    prompt: str | None = None
    messages: list[Message] | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text that the model continues, or a conversation for its chat template."""

    content: str | tuple[Message, ...]


def read_prompts(path: Path, limit: int, seed: int) -> list[Prompt]:
    """Read JSON lines, each with `prompt` or `messages` as in the OpenAI API; draw `limit` of them.

    Raise PromptsError.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsError(f"{path}: cannot be read: {error}") from error
    prompts = [_prompt(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    return random.Random(seed).sample(prompts, min(limit, len(prompts)))


def tiny_prompts(limit: int, seed: int) -> list[Prompt]:
    """Return tasks of the tiny model."""
    draw = random.Random(seed)
    return [Prompt((Message("user", make_task(draw.getrandbits(48)).prompt),)) for _ in range(limit)]


def _prompt(place: str, line: str) -> Prompt:
    try:
        read = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise PromptsError(f"{place}: {error}") from error
    if (read.prompt is None) == (read.messages is None):
        raise PromptsError(f"{place}: prompt, messages: one of the two expected")
    if read.messages is None:
        assert read.prompt is not None
        return Prompt(read.prompt)
    if not read.messages:
        raise PromptsError(f"{place}: messages: at least one expected")
    return Prompt(tuple(read.messages))


# vLLM's finish reasons of a request that ended by itself, and of one that was truncated.
_FINISHED: Final = ("stop", "length")


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """How to run the model. Sampling uses the model's defaults unless a temperature is given."""

    model: str
    # Name of the model in the samples file.
    name: str
    interval: int = 20
    max_tokens: int = 32_768
    temperature: float | None = None
    seed: int = 0
    engine_args: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(slots=True)
class _Request:
    generated: list[int] = field(default_factory=list)
    hidden: list[NDArray[np.float32]] = field(default_factory=list)
    # Total output tokens; None: not finished.
    length: int | None = None
    # Whether it ended by itself instead of being truncated.
    ended: bool = False


class _Steps:
    """Duration and batch size of the pure decode steps."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.requests = 0
        self.count = 0

    def add(self, seconds: float, requests: int) -> None:
        self.seconds += seconds
        self.requests += requests
        self.count += 1


def collect(prompts: Sequence[Prompt], options: CollectOptions, report: Callable[[int], None]) -> Samples:
    """Collect samples of all prompts; `report` gets the number of finished requests.

    Requests that were truncated by max_tokens or the context length are included as censored samples
    (`Samples.ended`); otherwise long requests would be missing. Raise RuntimeError if vLLM does not start,
    ValueError if no request ended by itself.
    """
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"})
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    from vllm import LLM

    from worker_agent.engine.vllm.hidden_states import HiddenStateTap, StepStates, rows_of_v1

    try:
        llm = LLM(
            model=options.model,
            seed=options.seed,
            distributed_executor_backend="uni",
            async_scheduling=False,
            disable_log_stats=True,
            **options.engine_args,
        )
    except (TypeError, ValueError, OSError) as error:
        raise RuntimeError(f"vLLM did not start with {options.model}: {error}") from error
    requests = {str(number): _Request() for number in range(len(prompts))}
    decoding = 0

    def take(states: StepStates) -> None:
        nonlocal decoding
        decoding = 0 if -1 in states.generated else len(states.generated)
        due = [row for row, generated in enumerate(states.generated) if generated % options.interval == 0]
        if due:
            rows = states.hidden[due].float().cpu().numpy()
            for row, state in zip(due, rows, strict=True):
                # vLLM appends a suffix to request ids.
                request = requests[states.request_ids[row].partition("-")[0]]
                if states.generated[row] not in request.generated[-1:]:  # again after a preemption
                    request.generated.append(states.generated[row])
                    request.hidden.append(state)

    engine = llm.llm_engine
    runner = _runner(llm)
    tap = HiddenStateTap(runner.get_model(), rows_of_v1(runner), take)
    for number, (tokens, sampling) in enumerate(_inputs(llm, prompts, options)):
        engine.add_request(str(number), {"prompt_token_ids": tokens}, sampling)
    steps, done = _Steps(), 0
    while engine.has_unfinished_requests():
        tap.arm()
        decoding = 0
        begun = time.perf_counter()
        outputs = engine.step()
        if decoding:
            steps.add(time.perf_counter() - begun, decoding)
        for output in outputs:
            if output.finished:
                done += 1
                answer = output.outputs[0]
                if answer.finish_reason in _FINISHED:
                    request = requests[output.request_id]
                    request.length = len(answer.token_ids)
                    request.ended = answer.finish_reason == "stop"
                report(done)
    tap.close()
    return _samples(list(requests.values()), options, steps)


def _runner(llm: object) -> Any:
    """Return the model runner of an in-process engine."""
    core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    return core.model_executor.driver_worker.worker.model_runner


def _inputs(
    llm: object, prompts: Sequence[Prompt], options: CollectOptions
) -> Iterator[tuple[list[int], object]]:
    tokenizer = llm.get_tokenizer()  # type: ignore[attr-defined]
    longest = llm.llm_engine.model_config.max_model_len  # type: ignore[attr-defined]
    for prompt in prompts:
        sampling = llm.get_default_sampling_params()  # type: ignore[attr-defined]
        # No per-request seed: on a CPU vLLM 0.32 fails with it if a prompt takes more than one step.
        sampling.max_tokens = options.max_tokens
        if options.temperature is not None:
            sampling.temperature = options.temperature
        if isinstance(prompt.content, str):
            tokens = tokenizer.encode(prompt.content)
        else:
            turns = [{"role": turn.role, "content": turn.content} for turn in prompt.content]
            tokens = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        if len(tokens) < longest:
            yield list(tokens), sampling


def _samples(requests: Sequence[_Request], options: CollectOptions, steps: _Steps) -> Samples:
    done = [
        (number, request.length, request)
        for number, request in enumerate(requests)
        if request.length is not None and request.hidden
    ]
    if not any(request.ended for _, _, request in done) or not steps.count:
        raise ValueError("no answer finished by itself: raise --max-tokens, or check the prompts")
    return Samples(
        Origin(
            format=FORMAT,
            model=options.name,
            interval=options.interval,
            step_s=steps.seconds / steps.count,
            batch=steps.requests / steps.count,
        ),
        hidden=np.concatenate([np.stack(request.hidden) for _, _, request in done]),
        request=_column(number for number, _, request in done for _ in request.generated),
        generated=_column(at for _, _, request in done for at in request.generated),
        remaining=_column(length - at for _, length, request in done for at in request.generated),
        ended=_column(int(request.ended) for _, _, request in done for _ in request.generated).astype(
            np.bool_
        ),
    )


def _column(values: Iterator[int]) -> NDArray[np.int32]:
    return np.fromiter(values, dtype=np.int32)
