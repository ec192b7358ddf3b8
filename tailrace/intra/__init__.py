"""Scheduling inside an instance: pure decisions, shared by vLLM's scheduler and the simulator."""
