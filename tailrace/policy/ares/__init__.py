"""ARES (sections 4 and 5): balance decode instances by current and predicted load in tokens.

`policy` has the decision points, `rescheduling` Algorithm 1, `dispatch` the handover from prefill to decode.
`tailrace.perf.horizon` defines the future steps at which loads are compared, and their weights;
`tailrace.perf.horizon` simulates an instance's load at those steps, in the workers.
"""
