"""Rows A1 to A12: what ARES reports."""

from __future__ import annotations

from typing import Final

from experiments.claims.base import Claim

_PAPER: Final = "ARES"


_ERROR: Final = "A9's and A10's errors of the predictor"
_LOAD: Final = f"vLLM's P99 TPOT of A3 and A4 gives the load; {_ERROR}"


def _row(claim_id: str, where: str, statement: str, number: str, inputs: str = "") -> Claim:
    return Claim(claim_id, _PAPER, where, statement, number, inputs)


A1: Final = _row(
    "A1", "Fig. 10a", "goodput, ShareGPT, vs vLLM / vs vLLM + rescheduling", "1.93x / 1.16x", _LOAD
)
A2: Final = _row(
    "A2",
    "Fig. 10b",
    "throughput, ShareGPT, RPS 0.17, vs vLLM; at RPS 0.13 ARES equals vLLM + rescheduling",
    "1.75x; equal",
    _LOAD,
)
A3: Final = _row(
    "A3",
    "Fig. 10c",
    "P99 TPOT, ShareGPT, RPS 0.17: vLLM, + rescheduling, ARES",
    "96.3, 28.3, 24.3 ms (-74.8%, of it prediction -14.1%)",
    _LOAD,
)
A4: Final = _row(
    "A4",
    "Fig. 10f",
    "P99 TPOT, Alpaca, RPS 1.7: vLLM, + rescheduling, ARES",
    "100.6, 80.8, 44.1 ms (-19.7%, a further -45.4%)",
    _LOAD,
)
A5: Final = _row(
    "A5",
    "Fig. 13",
    "mean variance of decode step times, 3 instances: ARES near oracle, vLLM bursty",
    "0.78 ms^2",
    _ERROR,
)
A6: Final = _row(
    "A6",
    "Fig. 12",
    "8 to 256 instances: variance of vLLM > vLLM + rescheduling > ARES-Oracle",
    "ordering",
)
A7: Final = _row("A7", "5.2", "scheduler time at 256 instances", "<= 300 ms")
A8: Final = _row(
    "A8",
    "5.3",
    "decode step at 50% KV; predictor's latency at batch 10; its overhead at k = 1 / 20",
    "18.23 ms; 1.40 ms; 7.68% / 0.38%",
)
A9: Final = _row(
    "A9",
    "Table 1",
    "MAE of PiA / mu-Serve / TetriInfer / ARES; ARES's latency at batch 1 / 10",
    "14169 / 8166 / 7658 / 3873; 1.33 / 2.44 ms",
    "its own errors",
)
A10: Final = _row(
    "A10",
    "Fig. 7",
    "MAE on outputs of 30-32K tokens, from the prompt / after 8000 tokens",
    "18256 / 2929",
    "its own errors",
)
A11: Final = _row("A11", "Fig. 11", "share of a migration's transfer in TBT, 10 Gbit/s, H800", "95.5%")
A12: Final = _row(
    "A12",
    "Fig. 3",
    "step times of the decode instances drift apart under round robin and current-load dispatch, RPS 0.1",
    "qualitative",
)
