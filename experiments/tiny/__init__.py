"""Training of the shipped tiny model (tailrace/tiny), and its score in vLLM."""
