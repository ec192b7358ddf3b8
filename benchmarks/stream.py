"""`make bench-stream`: one worker behind Tailrace against plain `vllm serve`, with the same API server and
engine.

With `--against clear`: Tailrace with certificates against Tailrace without; `--against edge`: behind an edge
against without one. With `--against FOLDER`: this checkout against another one in which `make install` has
been run, for instance an earlier revision. `--step-ms 20`: two simulated engines that take every stream and
whose steps always take so long, so that what is between them and the client is measured, not they.

All streams of a load begin at once. `--steady 20`: each is followed by another, and twenty seconds are
measured once their beginnings are spread evenly.

Both servers of a pair run side by side, and each load is applied to one and then to the other, several times.
The printed ratios are within each pair of adjacent measurements, so that drift of the machine's speed
cancels. The server that is started first is a few percent slower, even against itself, so half of the rounds
are run with one started first and half with the other.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import uvloop
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from tailrace.profiles import load_profile
from tests.harness.loadgen import StreamResult, completion_request, percentile, run_steadily, run_streams
from tests.harness.report import machine, save
from tests.harness.servers import MODEL, Engines, Server, TailraceCluster, VllmServe
from tests.harness.usage import cpu_seconds

_LOWER_IS_BETTER = ("ttft_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms", "cpu_s_per_1000")


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of one load on one server."""

    server: str
    concurrency: int
    tokens: int
    tokens_per_s: float
    ttft_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    cpu_s_per_1000: float
    cpu_ms_per_1000_by_part: dict[str, float]


def measure(server: Server, concurrency: int, tokens: int, round_number: int) -> Figures:
    """Apply one load: `concurrency` concurrent streams of `tokens` tokens each."""
    prompts = [f"Round {round_number}, stream {n}: count on and on." for n in range(concurrency)]
    requests = [completion_request(server.url, MODEL, prompt, tokens) for prompt in prompts]
    parts = server.pids()
    before = {part: cpu_seconds(pids) for part, pids in parts.items()}
    results = uvloop.run(run_streams(server.url, requests))
    used = {part: cpu_seconds(pids) - before[part] for part, pids in parts.items()}
    return _figures(server.name, results, used)


def measure_steadily(server: Server, concurrency: int, tokens: int, round_number: int, s: float) -> Figures:
    """Keep `concurrency` streams of `tokens` tokens running, and measure `s` seconds of it."""
    numbers = itertools.count()

    def request(share: float) -> bytes:
        prompt = f"Round {round_number}, stream {next(numbers)}: count on and on."
        return completion_request(server.url, MODEL, prompt, max(1, round(share * tokens)))

    parts = server.pids()
    before: dict[str, float] = {}
    used: dict[str, float] = {}
    results, began = uvloop.run(
        run_steadily(
            server.url,
            request,
            concurrency,
            s,
            lambda: before.update((part, cpu_seconds(pids)) for part, pids in parts.items()),
            lambda: used.update((part, cpu_seconds(pids) - before[part]) for part, pids in parts.items()),
        )
    )
    _refuse_failed(server.name, results)
    times = [[t for t in r.event_times if began <= t < began + s] for r in results]
    # Events, of which each has a token or, where the reader is slow, more: so tokens by their share.
    share = sum(r.tokens for r in results) / sum(len(r.event_times) for r in results)
    ttfts = [r.ttft for r in results if began <= r.started < began + s]
    gaps = [b - a for each in times for a, b in itertools.pairwise(each)]
    return _summary(server.name, concurrency, round(share * sum(map(len, times))), s, ttfts, gaps, used)


def _refuse_failed(name: str, results: Sequence[StreamResult]) -> None:
    if failed := [r.error for r in results if r.error]:
        raise RuntimeError(f"{name}: {len(failed)} streams failed: {failed[0]}")


def _figures(name: str, results: Sequence[StreamResult], used: dict[str, float]) -> Figures:
    _refuse_failed(name, results)
    total = sum(r.tokens for r in results)
    seconds = max(r.finished for r in results) - min(r.started for r in results)
    gaps = [gap for r in results for gap in r.gaps]
    return _summary(name, len(results), total, seconds, [r.ttft for r in results], gaps, used)


def _summary(
    name: str,
    concurrency: int,
    total: int,
    seconds: float,
    ttfts: Sequence[float],
    gaps: Sequence[float],
    used: dict[str, float],
) -> Figures:
    gaps = [gap * 1000 for gap in gaps]
    return Figures(
        server=name,
        concurrency=concurrency,
        tokens=total,
        tokens_per_s=total / seconds,
        ttft_ms=percentile(ttfts, 0.5) * 1000,
        ttft_p99_ms=percentile(ttfts, 0.99) * 1000,
        gap_p50_ms=percentile(gaps, 0.5),
        gap_p99_ms=percentile(gaps, 0.99),
        cpu_s_per_1000=sum(used.values()) / total * 1000,
        cpu_ms_per_1000_by_part={part: s / total * 1e6 for part, s in used.items()},
    )


@dataclass(frozen=True, slots=True)
class Pair:
    """Two servers that can be started in either order."""

    ours: Callable[[], Server]
    theirs: Callable[[], Server]

    @contextmanager
    def started(self, ours_first: bool) -> Iterator[tuple[Server, Server]]:
        """Run ours and theirs for the block."""
        with ExitStack() as stack:
            if ours_first:
                ours = stack.enter_context(self.ours())
                yield ours, stack.enter_context(self.theirs())
            else:
                theirs = stack.enter_context(self.theirs())
                yield stack.enter_context(self.ours()), theirs


Rounds = dict[int, list[tuple[Figures, Figures]]]


def apply_loads(
    ours: Server,
    theirs: Server,
    concurrencies: Sequence[int],
    tokens: int,
    numbers: Sequence[int],
    pairs: Rounds,
    steady_s: float,
) -> None:
    """Apply all loads to both servers in turn, once per round number, and add the figures to `pairs`."""
    for server in (ours, theirs):
        measure(server, max(concurrencies), 32, -1)  # warm up

    def apply(server: Server, concurrency: int, number: int) -> Figures:
        if steady_s:
            return measure_steadily(server, concurrency, tokens, number, steady_s)
        return measure(server, concurrency, tokens, number)

    for concurrency in concurrencies:
        for number in numbers:
            # Alternate which is first, so that whatever the first leaves behind does not count against one.
            if number % 2:
                second = apply(theirs, concurrency, number)
                pairs[concurrency].append((apply(ours, concurrency, number), second))
            else:
                first = apply(ours, concurrency, number)
                pairs[concurrency].append((first, apply(theirs, concurrency, number)))


def compare(
    servers: Pair,
    concurrencies: Sequence[int],
    tokens: int,
    rounds: int,
    steady_s: float,
    console: Console,
) -> dict[str, object]:
    """Apply all loads to both servers; return medians of each, and medians of the paired ratios ours /
    theirs."""
    pairs: Rounds = {concurrency: [] for concurrency in concurrencies}
    for ours_first in (True, False):
        numbers = range(0, rounds, 2) if ours_first else range(1, rounds, 2)
        with servers.started(ours_first) as (ours, theirs):
            names = ours.name, theirs.name
            which = names[0] if ours_first else names[1]
            console.print(f"  {len(numbers)} rounds, {which} started first", style="dim")
            # Each half alternates, too.
            apply_loads(ours, theirs, concurrencies, tokens, [n // 2 for n in numbers], pairs, steady_s)
    table = Table(title=f"{names[0]} against {names[1]} (medians of {rounds}; ratio = ours / theirs)")
    for column in ("streams", "figure", *names, "ratio", "range of ratios"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    loads: list[dict[str, object]] = []
    for concurrency, measured in pairs.items():
        ratios: dict[str, float] = {}
        for figure in ("tokens_per_s", *_LOWER_IS_BETTER):
            a, b = [getattr(p[0], figure) for p in measured], [getattr(p[1], figure) for p in measured]
            paired = [x / y for x, y in zip(a, b, strict=True) if y]
            ratios[figure] = statistics.median(paired) if paired else float("nan")
            spread = f"{min(paired):.2f} - {max(paired):.2f}" if paired else ""
            table.add_row(
                str(concurrency),
                figure.replace("_", " "),
                _number(statistics.median(a)),
                _number(statistics.median(b)),
                f"{ratios[figure]:.2f}",
                spread,
            )
        table.add_section()
        loads.append(
            {
                "concurrency": concurrency,
                "ratios": ratios,
                "ours": [asdict(p[0]) for p in measured],
                "theirs": [asdict(p[1]) for p in measured],
            }
        )
    console.print(table)
    _print_parts(loads, console)
    return {"ours": names[0], "theirs": names[1], "loads": loads}


def _number(value: float) -> str:
    """Format with three significant digits, or all of the integer part."""
    return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


def _print_parts(loads: Sequence[dict[str, object]], console: Console) -> None:
    """Print CPU time by part, at the highest concurrency."""
    last = loads[-1]
    for side in ("ours", "theirs"):
        runs = last[side]
        assert isinstance(runs, list)
        by_part = [run["cpu_ms_per_1000_by_part"] for run in runs]
        medians = {part: statistics.median(run.get(part, 0.0) for run in by_part) for part in by_part[0]}
        ordered = sorted(medians.items(), key=lambda item: -item[1])
        spent = ", ".join(f"{part} {ms:.1f}" for part, ms in ordered if ms)
        load = f"{last['concurrency']} streams, {runs[0]['server']}"
        console.print(f"  CPU ms per 1,000 tokens at {load}: {spent}")


def paced(step_ms: float, folder: Path) -> Engines:
    """Return two engines with constant steps. `folder`: for their profile, while they run."""
    profile = load_profile("llama-3.1-8b-h100")
    prefill = replace(profile.prefill, base_ms=step_ms, ms_per_token=0.0, ms_per_token_squared=0.0)
    decode = replace(profile.decode, base_ms=step_ms, ms_per_request=0.0, ms_per_kv_token=0.0)
    file = folder / "paced.json"
    file.write_bytes(
        msgspec.json.encode(replace(profile, name=f"{step_ms:g} ms", prefill=prefill, decode=decode))
    )
    return Engines("simulated", 2, (f"profile={file}", "max_num_seqs=4096"))


def _pair(against: str, engines: Engines, front: str, rust: Path) -> Pair:
    """Return the two servers of a comparison."""
    common = engines.arguments()
    if against == "vllm":
        return Pair(
            lambda: TailraceCluster(f"tailrace, {front}", ["--workers", "1", "--no-traces"], front),
            lambda: VllmServe(f"vllm serve, {front}", rust if front == "rust" else None),
        )
    if against == "clear":
        return Pair(
            lambda: TailraceCluster(f"with certificates, {front}", [*common, "--tls"], front),
            lambda: TailraceCluster(f"in the clear, {front}", common, front),
        )
    if against == "edge":
        return Pair(
            lambda: TailraceCluster(f"behind an edge, {front}", (), front, edge_for=engines),
            lambda: TailraceCluster(f"without an edge, {front}", common, front),
        )
    other = _installed(Path(against))
    return Pair(
        lambda: TailraceCluster(f"this checkout, {front}", common, front),
        lambda: TailraceCluster(f"{against}, {front}", common, front, other),
    )


def _installed(checkout: Path) -> Path:
    """Return the checkout's absolute path. Exit if nothing is installed in it."""
    python = checkout.absolute() / ".venv" / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"--against: {python} does not exist; run `make install` in {checkout}")
    return checkout.absolute()


def main() -> int:
    """Run the pairs that are available on this machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each stream")
    parser.add_argument("--rounds", type=int, default=6, help="half of them with each server started first")
    parser.add_argument("--fronts", nargs="+", choices=["python", "rust"], default=["python", "rust"])
    parser.add_argument(
        "--against",
        default="vllm",
        metavar="vllm|clear|edge|FOLDER",
        help="vllm: plain vllm serve; clear: Tailrace without certificates, against Tailrace with them; "
        "edge: Tailrace without an edge, against Tailrace behind one; a folder: another checkout of it, "
        "installed",
    )
    parser.add_argument("--engine", choices=["vllm", "simulated"], default="vllm", help="unless against vllm")
    parser.add_argument(
        "--step-ms",
        type=float,
        metavar="MS",
        help="simulated engines whose steps take so long",
    )
    parser.add_argument(
        "--steady",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="keep the streams running, each followed by another, and measure so long",
    )
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args()
    console = Console(stderr=options.output == "json")
    if options.step_ms and options.against == "vllm":
        parser.error("--step-ms: vllm serve has no simulated engine; say what else to compare --against")
    rust = Path(sys.executable).parent / "vllm-rs"
    pairs: list[dict[str, object]] = []
    console.print(f"on {machine()}")
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as folder:
        engines = paced(options.step_ms, Path(folder)) if options.step_ms else Engines(options.engine)
        for front in options.fronts:
            if front == "rust" and not rust.exists():
                console.print("no vllm-rs (scripts/install.sh --rust installs it): skipping the Rust pair")
                continue
            servers = _pair(options.against, engines, front, rust)
            loads = options.streams, options.tokens, options.rounds, options.steady
            pairs.append(compare(servers, *loads, console))
    figures: dict[str, object] = {
        "tokens_per_stream": options.tokens,
        "steady_s": options.steady,
        "pairs": pairs,
    }
    name = {"vllm": "stream", "clear": "stream-tls", "edge": "stream-edge"}.get(
        options.against, "stream-revisions"
    )
    path = save(name, figures)
    if options.output == "json":
        print(json.dumps(figures))
    console.print(f"figures: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
