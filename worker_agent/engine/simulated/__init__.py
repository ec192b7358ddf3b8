"""An engine with the timing and messages of a real one that computes nothing."""

from worker_agent.engine.simulated.engine import SimulatedEngine
from worker_agent.engine.simulated.settings import SimulatedFaults, SimulatedSettings

__all__ = ["SimulatedEngine", "SimulatedFaults", "SimulatedSettings"]
