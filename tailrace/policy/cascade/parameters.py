"""The parameters of CascadeInfer's policy."""

from __future__ import annotations

from typing import Final

from tailrace.policy.candidates import CACHE_AWARE
from tailrace.policy.parameters import Parameter
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

PARAMETERS: Final = (
    Parameter(
        "handover",
        str,
        BID_ASK,
        "how the receiver of a request within a stage is chosen: by bids, or round robin, also at arrival",
        source="CascadeInfer, section 4.4; round_robin is the baseline of its section 6.5",
        choices=(BID_ASK, ROUND_ROBIN),
    ),
    Parameter(
        "rebalance",
        bool,
        True,
        "whether overloaded instances hand requests over to peers of their stage",
        source="CascadeInfer, section 4.4; without it: section 6.5's inter-stage only",
    ),
    Parameter(
        "layout",
        str,
        PLANNED,
        "stages from the planner, one instance per stage, or all instances in one",
        source="CascadeInfer, section 4.2; the others are baselines of its section 6.5",
        choices=(PLANNED, CHAIN, ONE_STAGE),
    ),
    Parameter(
        "boundaries",
        str,
        QOE,
        "what boundary refinement balances: the QoE model's cost, the number of requests, or KV memory",
        source="CascadeInfer, section 4.3; the others are baselines of its section 6.5",
        choices=(QOE, QUANTITY, MEMORY),
    ),
    Parameter(
        "history_in_flight",
        float,
        64.0,
        "concurrent requests per instance in the history, for the first plan",
        unit="requests",
        source="ours, of CascadeInfer's Eq. (1)",
        minimum=1.0,
    ),
    Parameter(
        "plan_requests",
        float,
        5.0,
        "minimum arrivals per instance in a period for planning from it",
        unit="requests",
        source="CascadeInfer, section 4.3",
        minimum=0.0,
    ),
    Parameter(
        "replan_s",
        float,
        60.0,
        "interval between plans, and length of the period whose requests they use",
        unit="s",
        minimum=0.1,
    ),
    Parameter(
        "least_plan_gain",
        float,
        0.05,
        "minimum improvement of a plan over the current layout, by Eq. (1)",
        minimum=0.0,
        maximum=1.0,
    ),
    Parameter(
        "most_work",
        float,
        1.0,
        "maximum work that a plan may assign to an instance, relative to its capacity with full KV; 0: no "
        "limit",
        source="ours; CascadeInfer has no limit",
        minimum=0.0,
    ),
    Parameter(
        "plan_penalty",
        bool,
        False,
        "whether plans include the cost of unequal lengths, by the deployment's length penalty",
        source="ours; CascadeInfer's Eq. (1) has no such term",
    ),
    Parameter(
        "refine_s",
        float,
        5.0,
        "interval between boundary refinements",
        unit="s",
        source="ours, of CascadeInfer's section 4.3",
        minimum=0.1,
    ),
    Parameter(
        "smoothing",
        float,
        0.2,
        "weight of a new boundary in the moving average",
        source="ours, of CascadeInfer's section 4.3",
        minimum=0.0,
        maximum=1.0,
    ),
    Parameter(
        "outlier",
        float,
        1.25,
        "an instance is overloaded above this multiple of its stage's mean demand",
        source="CascadeInfer, section 4.4",
        minimum=1.0,
    ),
    Parameter(
        "bandwidth_bytes_per_s",
        float,
        50e9,
        "bandwidth of a KV transfer, for the cost of cuts",
        unit="bytes/s",
        source="CascadeInfer, section 6.1 (400 Gbit/s)",
        minimum=1.0,
    ),
    Parameter(
        "max_length",
        int,
        131_072,
        "longest context covered by plans",
        unit="tokens",
        source="CascadeInfer, section 6 (128K)",
        minimum=1,
    ),
    Parameter(
        "tick_interval_s",
        float,
        1.0,
        "interval between ticks, which look for outliers and run what is due",
        unit="s",
        minimum=0.01,
    ),
    CACHE_AWARE,
    PULLS,
)
