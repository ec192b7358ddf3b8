"""What it costs to divide a fleet among schedulers (docs/fleet-size.md).

Start with `ways`, which lists what is compared. `sharded` and `leased` are the policies that imitate several
schedulers and front ends with leases; `measure` simulates one case, `tables` shows the figures.
"""
