"""The parameters of CascadeInfer's policy."""

from __future__ import annotations

from typing import Final

from tailrace.policy.base import Policy
from tailrace.policy.candidates import CACHE_AWARE
from tailrace.policy.parameters import parameter
from tailrace.policy.pulling import PULLS

# Values of `handover`.
BID_ASK: Final = "bid_ask"
ROUND_ROBIN: Final = "round_robin"
# Values of `layout`.
PLANNED: Final = "planned"
CHAIN: Final = "chain"
ONE_STAGE: Final = "one_stage"
# Values of `boundaries`.
QOE: Final = "qoe"
QUANTITY: Final = "quantity"
MEMORY: Final = "memory"


class Parameters(Policy):
    """What users may set of the policy."""

    handover: str = parameter(
        BID_ASK,
        "how the receiver of a request within a stage is chosen: by bids, or round robin, also at arrival",
        source="CascadeInfer, section 4.4; round_robin is the baseline of its section 6.5",
        choices=(BID_ASK, ROUND_ROBIN),
    )
    rebalance: bool = parameter(
        True,
        "whether overloaded instances hand requests over to peers of their stage",
        source="CascadeInfer, section 4.4; without it: section 6.5's inter-stage only",
    )
    layout: str = parameter(
        PLANNED,
        "stages from the planner, one instance per stage, or all instances in one",
        source="CascadeInfer, section 4.2; the others are baselines of its section 6.5",
        choices=(PLANNED, CHAIN, ONE_STAGE),
    )
    boundaries: str = parameter(
        QOE,
        "what boundary refinement balances: the QoE model's cost, the number of requests, or KV memory",
        source="CascadeInfer, section 4.3; the others are baselines of its section 6.5",
        choices=(QOE, QUANTITY, MEMORY),
    )
    history_in_flight: float = parameter(
        64.0,
        "concurrent requests per instance in the history, for the first plan",
        unit="requests",
        source="ours, of CascadeInfer's Eq. (1)",
        minimum=1.0,
    )
    plan_requests: float = parameter(
        5.0,
        "minimum arrivals per instance in a period for planning from it",
        unit="requests",
        source="CascadeInfer, section 4.3",
        minimum=0.0,
    )
    replan_s: float = parameter(
        60.0,
        "interval between plans, and length of the period whose requests they use",
        unit="s",
        minimum=0.1,
    )
    least_plan_gain: float = parameter(
        0.05, "minimum improvement of a plan over the current layout, by Eq. (1)", minimum=0.0, maximum=1.0
    )
    most_work: float = parameter(
        1.0,
        "maximum work that a plan may assign to an instance, relative to its capacity with full KV; 0: no "
        "limit",
        source="ours; CascadeInfer has no limit",
        minimum=0.0,
    )
    plan_penalty: bool = parameter(
        False,
        "whether plans include the cost of unequal lengths, by the deployment's length penalty",
        source="ours; CascadeInfer's Eq. (1) has no such term",
    )
    refine_s: float = parameter(
        5.0,
        "interval between boundary refinements",
        unit="s",
        source="ours, of CascadeInfer's section 4.3",
        minimum=0.1,
    )
    smoothing: float = parameter(
        0.2,
        "weight of a new boundary in the moving average",
        source="ours, of CascadeInfer's section 4.3",
        minimum=0.0,
        maximum=1.0,
    )
    outlier: float = parameter(
        1.25,
        "an instance is overloaded above this multiple of its stage's mean demand",
        source="CascadeInfer, section 4.4",
        minimum=1.0,
    )
    bandwidth_bytes_per_s: float = parameter(
        50e9,
        "bandwidth of a KV transfer, for the cost of cuts",
        unit="bytes/s",
        source="CascadeInfer, section 6.1 (400 Gbit/s)",
        minimum=1.0,
    )
    max_length: int = parameter(
        131_072,
        "longest context covered by plans",
        unit="tokens",
        source="CascadeInfer, section 6 (128K)",
        minimum=1,
    )
    tick_interval_s: float = parameter(
        1.0, "interval between ticks, which look for outliers and run what is due", unit="s", minimum=0.01
    )
    cache_aware: bool = CACHE_AWARE
    pulls: bool = PULLS
