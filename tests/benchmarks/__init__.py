"""What the benchmarks make of what they measure."""
