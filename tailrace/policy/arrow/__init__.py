"""Arrow: adaptive scheduling over stateless instances in elastic pools (arXiv 2505.11916v1)."""
