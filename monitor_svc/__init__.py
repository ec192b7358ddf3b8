"""Collects what workers report and publishes the cluster's state."""
