"""Try to use a cluster's ports without belonging to the cluster."""
