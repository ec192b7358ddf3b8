"""The global scheduler: runs a policy over the cluster's state and carries out its decisions."""
