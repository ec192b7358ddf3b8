"""Load generators, the tester of APIs and the evaluation harness, each with a small fixed load."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from tailrace.tiny import MODEL_PATH
from tailrace.tiny.task import task
from tests.clients.client import PROGRAMS, Client, ClientError, Run, execute
from tests.clients.rows import Outcome
from tests.harness.servers import MODEL

_REQUESTS: Final = 8
_AT_A_TIME: Final = 4
_PROMPT_TOKENS: Final = 60
_OUTPUT_TOKENS: Final = 120


def run_vllm_bench(client: Client, run: Run) -> Outcome:
    """Run `vllm bench serve` with random prompts."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
    command += ["--base-url", run.url, "--model", str(MODEL_PATH), "--served-model-name", MODEL]
    command += ["--dataset-name", "random", "--random-input-len", str(_PROMPT_TOKENS)]
    command += ["--random-output-len", str(_OUTPUT_TOKENS), "--num-prompts", str(_REQUESTS)]
    command += ["--max-concurrency", str(_AT_A_TIME), "--seed", "1", "--temperature", "0", "--ignore-eos"]
    command += ["--save-result", "--save-detailed", "--result-dir", str(run.folder)]
    command += ["--result-filename", "result.json", "--disable-tqdm"]
    execute(command, folder=run.folder)
    result = _read(run.folder / "result.json")
    answers = {f"text {number}": text for number, text in enumerate(result["generated_texts"])}
    answers["output tokens"] = result["output_lens"]
    errors = {f"text {number}": error for number, error in enumerate(result["errors"]) if error}
    return Outcome(result["completed"] + result.get("failed", 0), errors, answers)


def run_aiperf(client: Client, run: Run) -> Outcome:
    """Run `aiperf profile` with synthetic streamed chats."""
    command = [client.program("aiperf"), "profile", "--model", MODEL, "--tokenizer", str(MODEL_PATH)]
    command += ["--url", run.url, "--endpoint-type", "chat", "--streaming", "--random-seed", "1"]
    command += ["--concurrency", str(_AT_A_TIME), "--request-count", str(_REQUESTS)]
    command += ["--synthetic-input-tokens-mean", str(_PROMPT_TOKENS), "--synthetic-input-tokens-stddev", "0"]
    command += ["--output-tokens-mean", str(_OUTPUT_TOKENS), "--output-tokens-stddev", "0"]
    command += ["--extra-inputs", "temperature:0", "--extra-inputs", "ignore_eos:true"]
    command += ["--output-artifact-dir", str(run.folder), "--export-outputs-json", "--ui", "none"]
    # Offline, it looks for a tokenizer in the hub's cache only, though it is a folder.
    execute(command, folder=run.folder, env={"HOME": str(run.folder), "HF_HUB_OFFLINE": ""})
    summary = _read(next(run.folder.rglob("profile_export_aiperf.json")))
    outputs = _read(next(run.folder.rglob("outputs.json")))["data"]
    failed = int(summary.get("error_request_count", {}).get("avg", 0))
    completed = int(summary["request_count"]["avg"])
    answers = {f"text {number}": each["response_text"] for number, each in enumerate(outputs)}
    answers["output tokens"] = summary["total_output_tokens"]["avg"]
    return Outcome(completed + failed, {"failed": str(failed)} if failed else {}, answers)


def run_guidellm(client: Client, run: Run) -> Outcome:
    """Run `guidellm run` with synthetic chats."""
    report = run.folder / "report.json"
    command = [client.program("guidellm"), "run", "--disable-console"]
    # `backend` takes what else is in a request's body as JSON.
    extras = {"body": {"temperature": 0, "ignore_eos": True}}
    backend = {"kind": "openai_http", "target": run.url, "model": MODEL, "extras": extras}
    data = {"kind": "synthetic_text", "prompt_tokens": _PROMPT_TOKENS, "output_tokens": _OUTPUT_TOKENS}
    command += ["--backend", json.dumps(backend), "--data", json.dumps(data)]
    command += ["--profile", f"kind=concurrent,streams={_AT_A_TIME}"]
    command += ["--constraint", f"kind=max_requests,count={_REQUESTS}", "--seed", "kind=static,value=1"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={MODEL_PATH}"]
    command += ["--output", f"kind=json,path={report}"]
    execute(command, folder=run.folder, env={"HOME": str(run.folder)})
    (benchmark,) = _read(report)["benchmarks"]
    requests = benchmark["requests"]
    done = sorted(requests["successful"], key=lambda each: str(each["request_args"]))
    answers: dict[str, object] = {f"text {number}": each["output"] for number, each in enumerate(done)}
    errors = {str(number): str(each) for number, each in enumerate(requests["errored"])}
    return Outcome(len(done) + len(errors), errors, answers)


def run_schemathesis(client: Client, run: Run) -> Outcome:
    """Run `schemathesis run` on the served OpenAPI document: valid and invalid requests by operation."""
    har = run.folder / "requests.har"
    command = [client.program("schemathesis"), "run", f"{run.url}/openapi.json", "--phases", "fuzzing"]
    command += ["--max-examples", "4", "--seed", "1", "--generation-deterministic", "--no-shrink"]
    command += ["--continue-on-failure", "--no-color"]
    command += ["--report", "har", "--report-har-path", str(har), "--request-timeout", "300"]
    command += ["--suppress-health-check", "all", "--checks", "not_a_server_error"]
    # 1: an operation failed a check, as some of vLLM's own do.
    execute(
        command,
        folder=run.folder,
        env={"SCHEMATHESIS_HOOKS": "short_answers", "PYTHONPATH": str(PROGRAMS)},
        statuses=(0, 1),
    )
    statuses: dict[str, Counter[str]] = {}
    for entry in _read(har)["log"]["entries"]:
        request = entry["request"]
        operation = f"{request['method']} {urlsplit(request['url']).path}"
        statuses.setdefault(operation, Counter())[str(entry["response"]["status"])] += 1
    answers = {name: dict(sorted(count.items())) for name, count in statuses.items()}
    return Outcome(sum(count.total() for count in statuses.values()), {}, answers)


_TASK: Final = """
task: countdown
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["<|im_end|>"], max_gen_toks: 400, temperature: 0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
_CHOICES: Final = """
task: countdown_choices
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def run_lm_eval(client: Client, run: Run) -> Outcome:
    """Run `lm_eval` on two local tasks: one that generates, one that chooses by likelihood."""
    tasks = [task(f"{chr(97 + number)}bcd", 12 + number, 4) for number in range(_REQUESTS)]
    documents = [
        {
            "question": f"<|im_start|>user\n{each.prompt}<|im_end|>\n<|im_start|>assistant\n",
            "answer": f"<think>{each.thought}</think>{each.answer}",
            "choices": [f"<think>{word}" for word in (each.thought[:12], each.thought[:12][::-1])],
        }
        for each in tasks
    ]
    data = run.folder / "countdown.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in documents))
    paths = [run.folder / "countdown.yaml", run.folder / "choices.yaml"]
    for path, text in zip(paths, (_TASK, _CHOICES), strict=True):
        path.write_text(text.format(data=data))
    model = f"model={MODEL},base_url={run.url}/v1/completions,tokenizer={MODEL_PATH}"
    command = [client.program("lm_eval"), "run", "--model", "local-completions", "--model_args"]
    command += [
        f"{model},num_concurrent={_AT_A_TIME},max_retries=1,timeout=600",
        "--tasks",
        ",".join(map(str, paths)),
    ]
    command += ["--output_path", str(run.folder / "out"), "--log_samples"]
    home = {"HOME": str(run.folder), "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    execute(command, folder=run.folder, env=home)
    results = _read(next(run.folder.rglob("results_*.json")))["results"]
    answers: dict[str, object] = {
        f"score of {name}": {key: value for key, value in scores.items() if key.endswith(",none")}
        for name, scores in results.items()
    }
    for samples in run.folder.rglob("samples_countdown_2*.jsonl"):
        for line in samples.read_text().splitlines():
            sample = json.loads(line)
            answers[f"text {sample['doc_id']}"] = sample["resps"]
    return Outcome(3 * len(documents), {}, answers)


def _read(path: Path) -> Any:
    if not path.exists():
        raise ClientError(f"it wrote no {path.name}")
    return json.loads(path.read_text())
