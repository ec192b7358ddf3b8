"""Our own policy: the four papers' mechanisms under one cost model (docs/policy-tailrace.md).

`steps` predicts step and prefill times; `costs` adds up what a request costs everybody, in seconds; `arrival`
does so for an arrival, and `offers` finds where that is least; `expect` says how long a request is expected
to go on; `pooled` and `staged` narrow the choice where pools or stages are set; `rebalance` finds migrations
that pay for themselves; `policy` has the five decision points.
"""
