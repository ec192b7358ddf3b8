"""What users may set of CascadeInfer's policy."""

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
        "who takes a request over within a stage: found by bids, or the next in turn, at arrival too",
        source="CascadeInfer, section 4.4; round_robin is the baseline of its section 6.5",
        choices=(BID_ASK, ROUND_ROBIN),
    ),
    Parameter(
        "rebalance",
        bool,
        True,
        "overloaded instances hand requests over to peers of their stage",
        source="CascadeInfer, section 4.4; without it: section 6.5's inter-stage only",
    ),
    Parameter(
        "layout",
        str,
        PLANNED,
        "stages by the planner, one instance a stage, or all instances in one",
        source="CascadeInfer, section 4.2; the others are baselines of its section 6.5",
        choices=(PLANNED, CHAIN, ONE_STAGE),
    ),
    Parameter(
        "boundaries",
        str,
        QOE,
        "what refined boundaries balance: the QoE model's cost, numbers of requests, or KV memory",
        source="CascadeInfer, section 4.3; the others are baselines of its section 6.5",
        choices=(QOE, QUANTITY, MEMORY),
    ),
    Parameter(
        "history_in_flight",
        float,
        64.0,
        "how many of the history's requests an instance has at a time, for the first plan",
        unit="requests",
        source="ours, of CascadeInfer's Eq. (1)",
        minimum=1.0,
    ),
    Parameter(
        "plan_requests",
        float,
        5.0,
        "requests an instance that must have come in a period for it to be planned from",
        unit="requests",
        source="CascadeInfer, section 4.3",
        minimum=0.0,
    ),
    Parameter(
        "replan_s",
        float,
        60.0,
        "how often stages are planned anew, and from the requests of how long",
        unit="s",
        minimum=0.1,
    ),
    Parameter(
        "least_plan_gain",
        float,
        0.05,
        "share by which a plan must be better, by Eq. (1), than the present layout",
        minimum=0.0,
        maximum=1.0,
    ),
    Parameter(
        "most_work",
        float,
        1.0,
        "of what an instance can do with its KV full, how much a plan may give it; 0: no limit",
        source="ours; CascadeInfer has no limit",
        minimum=0.0,
    ),
    Parameter(
        "plan_penalty",
        bool,
        False,
        "plans count what unequal lengths cost by the deployment's length penalty",
        source="ours; CascadeInfer's Eq. (1) has no such term",
    ),
    Parameter(
        "refine_s",
        float,
        5.0,
        "how often boundaries are refined",
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
        "an instance is overloaded from so many times its stage's mean demand",
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
        "longest context that is planned for",
        unit="tokens",
        source="CascadeInfer, section 6 (128K)",
        minimum=1,
    ),
    Parameter(
        "tick_interval_s",
        float,
        1.0,
        "how often outliers are looked for, and what is due is done",
        unit="s",
        minimum=0.01,
    ),
    CACHE_AWARE,
    PULLS,
)
