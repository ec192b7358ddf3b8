"""ARES (sections 4 and 5): decode instances balanced by current and predicted load, where load is tokens.

`tailrace.perf.horizon` says at which coming steps loads are looked at and what each counts for;
`tailrace.perf.future_load` is the workers' part, simulating an instance's load at those steps. `rescheduling`
is Algorithm 1; `dispatch` hands requests over from prefill to decode; `policy` has the policy.
"""
