"""Our own policy: placement, moves and pulls under one cost model (docs/policy-tailrace.md).

Start with `policy`, which has the decision points. `costs` is the cost model: the seconds that a request
costs all requests concerned. `rebalance` finds migrations that pay for themselves; `pulls` and `copies` do so
for transfers of cached prefixes.
"""
