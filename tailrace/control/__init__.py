"""What the scheduler and the simulator know of a cluster, and how a policy is asked about it."""
