"""A policy in a package of its own; docs/adding-a-policy.md walks through it."""
