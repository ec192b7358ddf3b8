"""Scheduling inside one instance: pure decisions, used unchanged by vLLM's scheduler and the simulator."""
