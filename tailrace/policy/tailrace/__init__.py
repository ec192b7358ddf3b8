"""Our own policy: the four papers' mechanisms under one cost model (docs/policy-tailrace.md).

Start with `policy`, which has the five decision points. `costs` is the cost model: the seconds that a request
costs all requests concerned. `arrival` computes that cost for an arrival, and `offers` finds the instance
where it is least. `moves` and `rebalance` find migrations that pay for themselves; `pulls` and `copies` do so
for transfers of cached prefixes. `pooled` and `staged` restrict the choice if pools or stages are set.
"""
