"""Policies on live fleets: `simulated` engines against the simulator, real `vllm` engines, and `replays`."""
